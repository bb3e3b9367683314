"""ATen handlers: pointwise calls, reductions and sources. Types are promoted here, so step ops never do."""

from __future__ import annotations

from typing import Any

import torch

from ..dialects.step import StepBuilder, ir_dtype, normalize_dim, torch_dtype
from ..ir.core import Value
from ..ir.types import BOOL, I64, ScalarType, TensorType
from .importer import Importer, aten


def result_element(*operands: Any) -> ScalarType:
    """The element type torch computes in for these operands (tensors and Python numbers)."""
    probes = []
    for x in operands:
        if isinstance(x, Value):
            probes.append(torch.empty((1,) if x.type.rank else (), dtype=torch_dtype(x.type.element), device="meta"))
        else:
            probes.append(x)
    tensors = [p for p in probes if isinstance(p, torch.Tensor)]
    dtype = tensors[0].dtype if len(probes) == 1 else None
    if dtype is None:
        first, *rest = sorted(probes, key=lambda p: not isinstance(p, torch.Tensor))
        running = first
        for other in rest:
            dtype = torch.result_type(running, other)
            dims = max(p.dim() if isinstance(p, torch.Tensor) else 0 for p in (running, other))
            running = torch.empty((1,) if dims else (), dtype=dtype, device="meta")
    assert dtype is not None
    return ir_dtype(dtype)


def operand(b: StepBuilder, x: Any, element: ScalarType) -> Value:
    """A tensor or number as a value of this element type. A gradient is rounded where a tensor was promoted."""
    return b.cast_to(x, element, rounds=True) if isinstance(x, Value) else b.full(x, (), element)


def binary(imp: Importer, name: str, x: Any, y: Any, **attributes: Any) -> Value:
    """A binary op in the type of its result."""
    element = imp.expected[0].element
    return getattr(imp.b, name)(operand(imp.b, x, element), operand(imp.b, y, element), **attributes)


FLOAT_UNARY = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
]
SAME_UNARY = ["neg", "abs", "sign", "relu", "floor", "ceil", "trunc"]


def _register_unary(name: str) -> None:
    @aten(name)
    def handler(imp: Importer, x: Value) -> Any:
        if imp.expected[0].element is BOOL:
            return NotImplemented
        return getattr(imp.b, name)(imp.b.cast_to(x, imp.expected[0].element))


for _name in FLOAT_UNARY + SAME_UNARY:
    _register_unary(_name)


@aten("round")
def _round(imp, x):
    return imp.b.round(x)


@aten("silu")
def _silu(imp, x):
    return imp.b.silu(x)


@aten("gelu")
def _gelu(imp, x, approximate="none"):
    return imp.b.gelu(x, approximate=approximate)


@aten("square")
def _square(imp, x):
    return imp.b.pow(x, 2) if x.type.element.kind != "bool" else NotImplemented


@aten("isnan")
def _isnan(imp, x):
    return imp.b.isnan(x) if x.type.element.kind == "float" else NotImplemented


@aten("logical_not")
def _logical_not(imp, x):
    return imp.b.bit_not(to_bool(imp.b, x))


@aten("bitwise_not")
def _bitwise_not(imp, x):
    return imp.b.bit_not(x)


def to_bool(b: StepBuilder, x: Value) -> Value:
    return x if x.type.element is BOOL else b.ne(x, 0)


def scaled(imp: Importer, y: Any, alpha: Any) -> Any:
    """alpha * y in the result's type."""
    if alpha == 1:
        return y
    element = imp.expected[0].element
    if not isinstance(y, Value):
        return y * alpha
    return imp.b.mul(imp.b.cast_to(y, element), alpha)


@aten("add.Tensor", "add.Scalar")
def _add(imp, x, y, alpha=1):
    if imp.expected[0].element is BOOL:
        return binary(imp, "bit_or", x, y) if alpha else imp.b.broadcast_to(x, imp.expected[0].shape)
    return binary(imp, "add", x, scaled(imp, y, alpha))


@aten("sub.Tensor", "sub.Scalar", "subtract.Tensor")
def _sub(imp, x, y, alpha=1):
    return binary(imp, "sub", x, scaled(imp, y, alpha))


@aten("rsub.Tensor", "rsub.Scalar")
def _rsub(imp, x, y, alpha=1):
    return binary(imp, "sub", y, scaled(imp, x, alpha))


@aten("mul.Tensor", "mul.Scalar", "multiply.Tensor")
def _mul(imp, x, y):
    return binary(imp, "bit_and" if imp.expected[0].element is BOOL else "mul", x, y)


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor", "divide.Tensor")
def _div(imp, x, y):
    return binary(imp, "div", x, y)


@aten("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(imp, x, y, rounding_mode=None):
    return binary(imp, "div", x, y, rounding=rounding_mode or "none")


@aten("floor_divide", "floor_divide.Scalar")
def _floor_divide(imp, x, y):
    return binary(imp, "div", x, y, rounding="floor")


@aten("remainder.Tensor", "remainder.Scalar")
def _remainder(imp, x, y):
    return binary(imp, "rem", x, y, rounding="floor")


@aten("fmod.Tensor", "fmod.Scalar")
def _fmod(imp, x, y):
    return binary(imp, "rem", x, y, rounding="trunc")


@aten("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar", "float_power.Tensor_Scalar")
def _pow(imp, x, y):
    return binary(imp, "pow", x, y) if imp.expected[0].element.kind == "float" or _natural(y) else NotImplemented


def _natural(y: Any) -> bool:
    return isinstance(y, int) and y >= 0


@aten("maximum", "max.other")
def _maximum(imp, x, y):
    return binary(imp, "maximum", x, y)


@aten("minimum", "min.other")
def _minimum(imp, x, y):
    return binary(imp, "minimum", x, y)


@aten("atan2")
def _atan2(imp, x, y):
    return binary(imp, "atan2", x, y)


def _register_comparison(name: str) -> None:
    @aten(f"{name}.Tensor", f"{name}.Scalar")
    def handler(imp: Importer, x: Any, y: Any) -> Value:
        element = result_element(x, y)
        return getattr(imp.b, name)(operand(imp.b, x, element), operand(imp.b, y, element))


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    _register_comparison(_name)


def _register_boolean(aten_name: str, op: str, logical: bool, overloads: tuple[str, ...]) -> None:
    @aten(*(f"{aten_name}{o}" for o in overloads))
    def handler(imp: Importer, x: Any, y: Any) -> Value:
        if logical:
            return getattr(imp.b, op)(to_bool(imp.b, x), to_bool(imp.b, y))
        return binary(imp, op, x, y)


for _name in ("and", "or", "xor"):
    _register_boolean(f"logical_{_name}", f"bit_{_name}", True, ("",))
    _register_boolean(f"bitwise_{_name}", f"bit_{_name}", False, (".Tensor", ".Scalar"))
    _register_boolean(f"__{_name}__", f"bit_{_name}", False, (".Tensor", ".Scalar"))


def select(imp: Importer, condition: Value, x: Any, y: Any) -> Value:
    element = imp.expected[0].element
    condition = to_bool(imp.b, condition)
    out = imp.b.select(condition, operand(imp.b, x, element), operand(imp.b, y, element))
    return imp.b.broadcast_to(out, imp.expected[0].shape)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(imp, condition, x, y):
    return select(imp, condition, x, y)


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(imp, x, mask, value):
    return select(imp, mask, value, x)


@aten("clamp", "clamp.Tensor", "clip")
def _clamp(imp, x, min=None, max=None):
    b, element = imp.b, imp.expected[0].element
    x = b.cast_to(x, element)
    if min is not None:
        min = operand(b, min, element)
        x = b.select(b.lt(x, min), min, x)
    if max is not None:
        max = operand(b, max, element)
        x = b.select(b.gt(x, max), max, x)
    return x


@aten("clamp_min", "clamp_min.Tensor")
def _clamp_min(imp, x, min):
    return _clamp(imp, x, min=min)


@aten("clamp_max", "clamp_max.Tensor")
def _clamp_max(imp, x, max):
    return _clamp(imp, x, max=max)


@aten("hardtanh")
def _hardtanh(imp, x, min_val=-1.0, max_val=1.0):
    # unlike clamp, hardtanh passes no gradient at the borders
    b = imp.b
    y = b.select(b.le(x, min_val), min_val, x)
    return b.select(b.ge(x, max_val), max_val, y)


@aten("relu6")
def _relu6(imp, x):
    return _hardtanh(imp, x, 0.0, 6.0)


@aten("leaky_relu")
def leaky_relu(imp, x, negative_slope=0.01):
    return imp.b.select(imp.b.gt(x, 0), x, imp.b.mul(x, negative_slope))


@aten("log_sigmoid")
def _log_sigmoid(imp, x):
    b = imp.b
    return b.sub(b.select(b.lt(x, 0), x, 0.0), b.log1p(b.exp(b.neg(b.abs(x)))))


@aten("elu")
def _elu(imp, x, alpha=1.0, scale=1.0, input_scale=1.0):
    b = imp.b
    low = b.select(b.le(x, 0), x, 0.0)  # the exponential of what is not used must stay finite
    negative = b.mul(b.expm1(low if input_scale == 1 else b.mul(low, input_scale)), alpha * scale)
    return b.select(b.le(x, 0), negative, x if scale == 1 else b.mul(x, scale))


@aten("selu")
def _selu(imp, x):
    return _elu(imp, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@aten("celu")
def _celu(imp, x, alpha=1.0):
    return _elu(imp, x, alpha, 1.0, 1 / alpha)


@aten("softplus")
def _softplus(imp, x, beta=1, threshold=20):
    b = imp.b
    scaled = x if beta == 1 else b.mul(x, beta)
    straight = b.gt(scaled, threshold)
    soft = b.log1p(b.exp(b.select(straight, 0.0, scaled)))
    return b.select(straight, x, soft if beta == 1 else b.div(soft, beta))


@aten("prelu")
def _prelu(imp, x, weight):
    b = imp.b
    if weight.type.size > 1:
        weight = b.reshape_to(weight, (weight.type.size, *(1,) * (x.type.rank - 2)))
    return b.select(b.gt(x, 0), x, b.mul(x, b.reshape_to(weight, ()) if weight.type.size == 1 else weight))


@aten("hardswish")
def _hardswish(imp, x):
    return imp.b.div(imp.b.mul(x, _hardtanh(imp, imp.b.add(x, 3.0), 0.0, 6.0)), 6.0)


@aten("glu")
def _glu(imp, x, dim=-1):
    b, dim = imp.b, normalize_dim(dim, x.type.rank)
    half, size = x.type.shape[dim] // 2, x.type.shape[dim]
    return b.mul(b.slice(x, dim=dim, start=0, end=half), b.sigmoid(b.slice(x, dim=dim, start=half, end=size)))


@aten("isinf")
def _isinf(imp, x):
    return imp.b.eq(imp.b.abs(x), float("inf")) if x.type.element.kind == "float" else NotImplemented


@aten("isfinite")
def _isfinite(imp, x):
    return imp.b.lt(imp.b.abs(x), float("inf")) if x.type.element.kind == "float" else NotImplemented


@aten("threshold_backward")
def _threshold_backward(imp, dy, x, threshold):
    return imp.b.select(imp.b.le(x, threshold), 0.0, dy)


@aten("addcmul")
def _addcmul(imp, x, y, z, value=1):
    b, element = imp.b, imp.expected[0].element
    y, z = b.cast_to(y, element), b.cast_to(z, element)
    product = b.mul(y, z) if value == 1 else b.mul(b.mul(y, value), z)
    return b.add(b.cast_to(x, element), product)


@aten("addcdiv")
def _addcdiv(imp, x, y, z, value=1):
    b, element = imp.b, imp.expected[0].element
    y, z = b.cast_to(y, element), b.cast_to(z, element)
    return b.add(b.cast_to(x, element), b.div(y if value == 1 else b.mul(y, value), z))


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(imp, x, y, weight):
    return imp.b.lerp(x, y, operand(imp.b, weight, imp.expected[0].element))


@aten("mse_loss")
def _mse_loss(imp, x, y, reduction=1):
    b = imp.b
    difference = b.sub(operand(b, x, imp.expected[0].element), operand(b, y, imp.expected[0].element))
    return reduce_loss(b, b.pow(difference, 2), reduction)


@aten("l1_loss")
def _l1_loss(imp, x, y, reduction=1):
    b = imp.b
    difference = b.sub(operand(b, x, imp.expected[0].element), operand(b, y, imp.expected[0].element))
    return reduce_loss(b, b.abs(difference), reduction)


def distance(imp: Importer, x: Value, y: Value) -> Value:
    """|x - y| in the type of the result."""
    element = imp.expected[0].element
    return imp.b.abs(imp.b.sub(operand(imp.b, x, element), operand(imp.b, y, element)))


@aten("huber_loss")
def _huber_loss(imp, x, y, reduction=1, delta=1.0):
    b, apart = imp.b, distance(imp, x, y)
    far = b.mul(b.sub(apart, 0.5 * delta), delta)
    return reduce_loss(b, b.select(b.le(apart, delta), b.mul(b.mul(apart, apart), 0.5), far), reduction)


@aten("smooth_l1_loss")
def _smooth_l1_loss(imp, x, y, reduction=1, beta=1.0):
    b, apart = imp.b, distance(imp, x, y)
    if beta == 0:
        return reduce_loss(b, apart, reduction)
    near = b.div(b.mul(b.mul(apart, 0.5), apart), beta)
    return reduce_loss(b, b.select(b.lt(apart, beta), near, b.sub(apart, 0.5 * beta)), reduction)


def reduce_loss(b: StepBuilder, x: Value, reduction: int) -> Value:
    """ATen's reduction codes: 0 none, 1 mean, 2 sum."""
    if reduction == 0:
        return x
    dims = tuple(range(x.type.rank))
    return b.mean(x, dims=dims) if reduction == 1 else b.sum(x, dims=dims)


# ---- reductions ------------------------------------------------------------------------------------------------------


def all_dims(x: Value, dims: Any) -> tuple[int, ...]:
    """Reduced dimensions counted from the front; None or an empty list mean all of them."""
    if dims is None or dims == []:
        return tuple(range(x.type.rank))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({normalize_dim(d, x.type.rank) for d in dims})) if x.type.rank else ()


@aten("sum", "sum.dim_IntList")
def _sum(imp, x, dim=None, keepdim=False, dtype=None):
    return imp.b.sum(imp.b.cast_to(x, imp.expected[0].element), dims=all_dims(x, dim), keepdim=keepdim)


@aten("mean", "mean.dim")
def _mean(imp, x, dim=None, keepdim=False, dtype=None):
    return imp.b.mean(imp.b.cast_to(x, imp.expected[0].element), dims=all_dims(x, dim), keepdim=keepdim)


@aten("amax")
def _amax(imp, x, dim=(), keepdim=False):
    return imp.b.amax(x, dims=all_dims(x, list(dim) if not isinstance(dim, int) else dim), keepdim=keepdim)


@aten("amin")
def _amin(imp, x, dim=(), keepdim=False):
    return imp.b.amin(x, dims=all_dims(x, list(dim) if not isinstance(dim, int) else dim), keepdim=keepdim)


@aten("max")
def _max(imp, x):
    return imp.b.amax(x, dims=all_dims(x, None))


@aten("min")
def _min(imp, x):
    return imp.b.amin(x, dims=all_dims(x, None))


def _extremum_along(imp: Importer, x: Value, dim: int, keepdim: bool, arg: str) -> Any:
    if x.type.rank == 0:
        return NotImplemented
    b, dim = imp.b, normalize_dim(dim, x.type.rank)
    index = getattr(b, arg)(b.cast_to(x, I64) if x.type.element is BOOL else x, dim=dim, keepdim=True)
    value = b.gather(x, index, dim=dim)
    return [b.reshape_to(value, imp.expected[0].shape), b.reshape_to(index, imp.expected[1].shape)]


@aten("max.dim")
def _max_dim(imp, x, dim, keepdim=False):
    return _extremum_along(imp, x, dim, keepdim, "argmax")


@aten("min.dim")
def _min_dim(imp, x, dim, keepdim=False):
    return _extremum_along(imp, x, dim, keepdim, "argmin")


def _register_arg(name: str) -> None:
    @aten(name)
    def handler(imp: Importer, x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
        b = imp.b
        if x.type.rank == 0:
            return NotImplemented
        if dim is None:
            flat = b.reshape_to(x, (x.type.size,))
            return b.reshape_to(getattr(b, name)(flat, dim=0), imp.expected[0].shape)
        return getattr(b, name)(x, dim=normalize_dim(dim, x.type.rank), keepdim=keepdim)


_register_arg("argmax")
_register_arg("argmin")


def _register_truth(name: str) -> None:
    @aten(name, f"{name}.dim", f"{name}.dims")
    def handler(imp: Importer, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        if imp.expected[0].element is not BOOL:
            return NotImplemented
        return getattr(imp.b, name)(to_bool(imp.b, x), dims=all_dims(x, dim), keepdim=keepdim)


_register_truth("any")
_register_truth("all")


@aten("logsumexp")
def _logsumexp(imp, x, dim, keepdim=False):
    if x.type.rank == 0:
        return NotImplemented
    return imp.b.logsumexp(imp.b.cast_to(x, imp.expected[0].element), dims=all_dims(x, dim), keepdim=keepdim)


@aten("var.correction")
def _var(imp, x, dim=None, correction=1, keepdim=False, exact_zero=False):
    if x.type.rank == 0 or correction is None:
        return NotImplemented
    return imp.b.variance(x, dims=all_dims(x, dim), keepdim=keepdim, correction=correction, exact_zero=exact_zero)


@aten("var.dim", "var")
def _var_dim(imp, x, dim=None, unbiased=True, keepdim=False, exact_zero=False):
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return _var(imp, x, dim, int(unbiased), keepdim, exact_zero)


@aten("var_mean.dim", "var_mean")
def _var_mean_dim(imp, x, dim=None, unbiased=True, keepdim=False):
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return _var_mean(imp, x, dim, int(unbiased), keepdim)


@aten("var_mean.correction")
def _var_mean(imp, x, dim=None, correction=1, keepdim=False):
    if x.type.rank == 0 or correction is None:
        return NotImplemented
    dims = all_dims(x, dim)
    return [
        imp.b.variance(x, dims=dims, keepdim=keepdim, correction=correction),
        imp.b.mean(x, dims=dims, keepdim=keepdim),
    ]


def root(imp: Importer, x: Value) -> Value:
    """The square root of a sum of squares, with no gradient where it is zero, as autograd has it."""
    b = imp.b
    if not imp.differentiable:
        return b.sqrt(x)
    zero = b.eq(x, 0)
    return b.select(zero, 0.0, b.sqrt(b.select(zero, 1.0, x)))


@aten("std.correction")
def _std(imp, x, dim=None, correction=1, keepdim=False):
    found = _var(imp, x, dim, correction, keepdim, exact_zero=True)
    return found if found is NotImplemented else root(imp, found)


@aten("std.dim", "std")
def _std_dim(imp, x, dim=None, unbiased=True, keepdim=False):
    found = _var_dim(imp, x, dim, unbiased, keepdim, exact_zero=True)
    return found if found is NotImplemented else root(imp, found)


@aten("linalg_vector_norm")
def _vector_norm(imp, x, order=2, dim=None, keepdim=False, dtype=None):
    if order != 2 or imp.expected[0].element.bits < 32 or x.type.rank == 0:
        return NotImplemented
    x = imp.b.cast_to(x, imp.expected[0].element)
    return root(imp, imp.b.sum(imp.b.mul(x, x), dims=all_dims(x, dim), keepdim=keepdim))


@aten("cumsum")
def _cumsum(imp, x, dim, dtype=None):
    return imp.b.cumsum(imp.b.cast_to(x, imp.expected[0].element), dim=normalize_dim(dim, x.type.rank))


@aten("prod.dim_int")
def _prod(imp, x, dim, keepdim=False, dtype=None):
    if x.type.rank == 0:
        return NotImplemented
    # only for integers and masks: its gradient needs care at zeros, which the traced one has
    if imp.expected[0].element.kind == "float":
        return NotImplemented
    return imp.b.prod(imp.b.cast_to(x, imp.expected[0].element), dims=all_dims(x, dim), keepdim=keepdim)


@aten("topk")
def _topk(imp, x, k, dim=-1, largest=True, sorted=True):
    return imp.b.topk(x, k=k, dim=normalize_dim(dim, x.type.rank), largest=largest, ordered=sorted)


@aten("sort", "sort.stable")
def _sort(imp, x, *args, dim=-1, descending=False, stable=False):
    if args and isinstance(args[0], bool) and len(args) > 1 and not isinstance(args[1], bool):
        return NotImplemented
    if args:
        dim = args[0]
        descending = args[1] if len(args) > 1 else descending
    if x.type.rank == 0:
        return NotImplemented
    return imp.b.sort(x, dim=normalize_dim(dim, x.type.rank), descending=descending, stable=bool(stable))


# ---- sources ---------------------------------------------------------------------------------------------------------


def constant(imp: Importer, value: Any) -> Any:
    type = imp.expected[0]
    if type.element.kind == "complex":
        return NotImplemented
    return imp.b.full(value, type.shape, type.element)


@aten(
    "zeros",
    "zeros_like",
    "new_zeros",
    "empty.memory_format",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
)
def _zeros(imp, *_, **__):
    return constant(imp, 0)


@aten("ones", "ones_like", "new_ones")
def _ones(imp, *_, **__):
    return constant(imp, 1)


@aten("full", "full_like", "new_full")
def _full(imp, _, *args, fill_value=None, **__):
    value = args[-1] if args else fill_value
    if isinstance(value, Value):
        return NotImplemented
    return constant(imp, value)


@aten("scalar_tensor")
def _scalar_tensor(imp, value, **_):
    return constant(imp, value)


def _iota(imp: Importer, start: Any, stride: Any) -> Value:
    return imp.b.iota(start=start, stride=stride, type=imp.expected[0])


@aten("arange")
def _arange(imp, end, **_):
    return _iota(imp, 0, 1)


@aten("arange.start")
def _arange_start(imp, start, end, **_):
    return _iota(imp, start, 1)


@aten("arange.start_step")
def _arange_start_step(imp, start, end, step=1, **_):
    return _iota(imp, start, step)


@aten("eye", "eye.m")
def _eye(imp, *_, **__):
    b, type = imp.b, imp.expected[0]
    rows, cols = type.shape
    row = b.unsqueeze(b.iota(start=0, stride=1, type=TensorType((rows,), I64)), 1)
    col = b.iota(start=0, stride=1, type=TensorType((cols,), I64))
    return b.cast_to(b.eq(row, col), type.element)


def _triangle(imp: Importer, x: Value, diagonal: int, lower: bool) -> Value:
    b = imp.b
    rows, cols = x.type.shape[-2:]
    row = b.unsqueeze(b.iota(start=diagonal, stride=1, type=TensorType((rows,), I64)), 1)
    col = b.iota(start=0, stride=1, type=TensorType((cols,), I64))
    keep = b.le(col, row) if lower else b.ge(col, row)
    return b.select(keep, x, b.full(0, (), x.type.element))


@aten("tril")
def _tril(imp, x, diagonal=0):
    return _triangle(imp, x, diagonal, True)


@aten("triu")
def _triu(imp, x, diagonal=0):
    return _triangle(imp, x, diagonal, False)
