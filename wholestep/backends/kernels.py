"""A call of the ATen provider as a list of ATen operators on numbered tensors, so that it can run in given memory.

The call is traced once per kind of operands with tensors that have no memory. Views cost nothing and are taken when the
kernel is bound to addresses; an operator with an `out=` kernel writes where it is told; any other one makes its result
itself and that is copied: such a kernel `allocates`. A call that cannot be traced is one such operator as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from ..dialects.step import constant_value
from ..dialects.strides import Strides, is_dense, row_major
from ..ir.core import Op
from ..torch_private import FakeTensorMode, TorchDispatchMode, has_kernel, is_composite, schema_of
from .convolutions import in_parts, out_call

#: what a step does with memory
VIEW, OUT, NEW, COPY, FILL, MUTATE = "view", "out", "new", "copy", "fill", "mutate"
#: a kernel of another provider: called with its operands, then with the tensors it makes
KERNEL = "kernel"
_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_FILL = {
    "aten::zeros": 0,
    "aten::zeros_like": 0,
    "aten::new_zeros": 0,
    "aten::ones": 1,
    "aten::ones_like": 1,
    "aten::new_ones": 1,
    "aten::full": None,
    "aten::full_like": None,
    "aten::new_full": None,
    "aten::scalar_tensor": None,
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_COPY = {"aten::clone", "aten::_to_copy", "aten::lift_fresh_copy"}


def _slice_backward(grad: torch.Tensor, sizes: Sequence[int], *where: int) -> torch.Tensor:
    out = grad.new_zeros(sizes)
    torch.ops.aten.slice.Tensor(out, *where).copy_(grad)
    return out


def _select_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, index: int) -> torch.Tensor:
    out = grad.new_zeros(sizes)
    out.select(dim, index).copy_(grad)
    return out


def _pad(x: torch.Tensor, widths: Sequence[int], value: float = 0) -> torch.Tensor:
    pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)][::-1]
    first = x.dim() - len(pairs)
    inner = x
    for dim, (low, high) in enumerate(pairs, first):  # a negative width cuts
        inner = inner.narrow(dim, max(-low, 0), x.shape[dim] - max(-low, 0) - max(-high, 0))
    grown = [n + max(low, 0) + max(high, 0) for n, (low, high) in zip(inner.shape[first:], pairs, strict=True)]
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format  # as ATen's own padding lies
    out = torch.empty([*x.shape[:first], *grown], dtype=x.dtype, device=x.device, memory_format=layout)
    middle = out
    for dim, (low, high) in enumerate(pairs, first):  # each border is as wide as what is inside of it by then
        if low > 0:
            middle.narrow(dim, 0, low).fill_(value)
        if high > 0:
            middle.narrow(dim, middle.shape[dim] - high, high).fill_(value)
        middle = middle.narrow(dim, max(low, 0), inner.shape[dim])
    middle.copy_(inner)
    return out


def _as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], further: int) -> torch.Tensor:
    return x.as_strided(size, stride, x.storage_offset() + further)


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.index_select(weight, 0, indices.reshape(-1)).view(*indices.shape, weight.shape[1])


#: operators without an `out=` kernel, by others that compute the same bits and have one
_BY_OTHERS: dict[str, Callable[..., Any]] = {
    "aten::relu": lambda x: torch.clamp_min(x, 0),
    "aten::rsub": lambda x, y, alpha=1: torch.sub(y, x, alpha=alpha),
    "aten::slice_backward": _slice_backward,
    "aten::select_backward": _select_backward,
    "aten::embedding": _embedding,
    "aten::constant_pad_nd": _pad,
}
#: numbers that stand for the numbers of the host while a call is traced: twice, to see what is computed from them
_SENTINELS = ((0.7390851332151607, 0.0091), (0.5671432904097838, 0.0113))


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the kernel, by its number; the operands come first."""

    number: int


@dataclass(frozen=True, slots=True)
class Number:
    """An operand that is a Python number when the kernel runs."""

    operand: int


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, strides and type of a tensor that starts at the beginning of its memory."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * self.dtype.itemsize


@dataclass(slots=True)
class Step:
    """One ATen operator: arguments with `Ref` and `Number` where operands go; `makes` are the tensors it gives."""

    kind: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: tuple[int, ...]
    #: for OUT: the names of the arguments that take `makes`
    outs: tuple[str, ...] = ()
    elementwise: bool = False

    def reads(self) -> set[int]:
        found: set[int] = set()
        collect(self.args, found)
        collect(tuple(self.kwargs.values()), found)
        return found


@dataclass(slots=True)
class Kernel:
    """What a call does, ready to be bound to memory."""

    operands: int
    steps: list[Step]
    #: tensors with memory of their own, by number
    memory: dict[int, Spec]
    #: the number of the tensor whose memory each result is, and how the result lies there
    results: list[int]
    specs: list[Spec]
    #: per result: operands whose memory the result may take, once nobody else reads them
    over: list[frozenset[int]] = field(default_factory=list)
    #: tensors that only live inside the kernel: (number, first step, one past the last step)
    scratch: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def allocates(self) -> bool:
        return any(s.kind == NEW for s in self.steps)

    @property
    def makes(self) -> int:
        """The most bytes of results that one of its operators makes by itself."""
        made = [sum(self.memory[n].bytes for n in s.makes if n >= 0) for s in self.steps if s.kind == NEW]
        return max(made, default=0)


def collect(value: Any, into: set[int]) -> None:
    if isinstance(value, Ref):
        into.add(value.number)
    elif isinstance(value, list | tuple):
        for v in value:
            collect(v, into)


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nested argument with every leaf changed."""
    if isinstance(value, list | tuple):
        return type(value)(replaced(v, change) for v in value)
    return change(value)


# ---- operators -------------------------------------------------------------------------------------------------------


#: operators that lay a tensor given as `out` out anew, as their operand lies, in memory that others read otherwise
RELAYS = re.compile(r"aten::((reflection|replication)_pad\dd(_backward)?|adaptive_avg_pool\dd|max_unpool2d)")


@cache
def out_form(operator: Any, device: str) -> tuple[Any, tuple[str, ...]] | None:
    """The overload that writes into given tensors by a kernel of its own, and the names of those arguments."""
    schema = schema_of(operator)
    if schema.name in ("aten::binary_cross_entropy", "aten::huber_loss"):  # they use `out` for what they reduce
        return None
    if RELAYS.fullmatch(schema.name):
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    packet = operator.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = schema_of(other).arguments
        outs = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.kwarg_only]
        if len(outs) != len(schema.returns) or any(str(a.type) != "Tensor" for a in outs):
            continue
        rest = [(a.name, str(a.type)) for a in arguments if a not in outs]
        if rest == wanted and has_kernel(other, device):
            return other, tuple(a.name for a in outs)
    return None


@cache
def has_in_place_form(operator: Any) -> bool:
    """Whether the operator may write its result over its first operand: torch has `add_` beside `add`."""
    if not hasattr(operator, "overloadpacket"):  # a call of ours
        return False
    name = schema_of(operator).name.removeprefix("aten::")
    return hasattr(torch.ops.aten, f"{name}_")


def writes_arguments(operator: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema_of(operator).arguments)


def gives_views(operator: Any) -> bool:
    returns = schema_of(operator).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


# ---- tracing ---------------------------------------------------------------------------------------------------------


class Untraceable(Exception):
    """The call decides by data, or does what no list of operators tells."""


class _Recorder(TorchDispatchMode):
    """Writes down the operators that reach the dispatcher."""

    def __init__(self, device: torch.device, numbers: dict[float, int]):
        super().__init__()
        self.device, self.numbers = device, numbers
        self.tensors: list[torch.Tensor] = []
        self.number_of: dict[int, int] = {}
        self.root: list[int] = []
        self.memory: dict[int, Spec] = {}
        self.steps: list[Step] = []
        self.problem = ""

    def add(self, tensor: torch.Tensor, root: int = -1) -> int:
        number = len(self.tensors)
        self.tensors.append(tensor)
        self.number_of[id(tensor)] = number
        self.root.append(number if root < 0 else root)
        return number

    def leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self.number_of.get(id(value))
            if number is None:
                self.problem = self.problem or "it uses a tensor that is no operand"
                return value
            return Ref(number)
        if type(value) is float and value in self.numbers:
            return Number(self.numbers[value])
        return value

    def refusal(self, name: str) -> str:
        """Why a call with this operator cannot be a list of operators."""
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero"):
            return f"it reads numbers ({name})"
        if name.startswith("aten::mkldnn_") or "_rnn" in name or "_lstm" in name or "_gru" in name:
            return f"{name} passes on memory whose size nothing but a real call tells"
        return "it makes a tensor of Python numbers" if name == "aten::lift_fresh" else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = schema_of(func).name
        self.problem = self.problem or self.refusal(name)
        # (an exception would pass through C++ code that does not expect one: it is raised at the end)
        if self.problem or func.namespace == "prim":
            return func(*args, **kwargs)
        if is_composite(func) and not has_kernel(func, self.device.type):
            with self:
                return func.decompose(*args, **kwargs)
        given = replaced(tuple(args), self.leaf)
        named = {k: replaced(v, self.leaf) for k, v in kwargs.items()}
        if self.problem:
            return func(*args, **kwargs)
        if name in _BY_OTHERS and (name != "aten::rsub" or torch.is_tensor(args[1])):
            with self:
                return _BY_OTHERS[name](*args, **kwargs)
        if writes_arguments(func):
            return self.mutate(func, args, kwargs, given, named)
        made = as_kernels_lay_out(name, args, func(*args, **kwargs))
        if name == "aten::convolution" and (parts := in_parts(args, made, self.device.type)) is not None:
            with self:
                return parts()
        outputs = made if isinstance(made, list | tuple) else (made,)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
        if len(tensors) != len(outputs):
            self.fresh(NEW, func, given, named, outputs)  # one without results checks something: it stays
            return made
        if len(tensors) == 1 and id(tensors[0]) in self.number_of:
            return made
        if gives_views(func) or name == "aten::_unsafe_view":
            base = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            root = self.root[self.number_of[id(base)]]
            numbers = tuple(self.add(t, root) for t in tensors)
            call = func
            if name == "aten::as_strided":
                call, named = _as_strided, {}
                given = (given[0], given[1], given[2], made.storage_offset() - base.storage_offset())
            self.steps.append(Step(VIEW, call, given, named, numbers))
            return made
        if name in _EMPTY:
            self.own(tensors[0])
        elif name in _FILL:
            value = _FILL[name]
            if value is None:
                schema = schema_of(func)
                position = next(i for i, a in enumerate(schema.arguments) if a.name in ("fill_value", "s"))
                value = named.get("fill_value") if position >= len(given) else given[position]
            number = self.own(tensors[0])
            self.steps.append(Step(FILL, torch.Tensor.fill_, (Ref(number), value), {}, (number,)))
        elif name in _COPY and tensors[0].device.type == args[0].device.type:
            number = self.own(tensors[0])
            self.steps.append(Step(COPY, torch.Tensor.copy_, (Ref(number), given[0]), {}, (number,)))
        else:
            self.compute(func, args, given, named, tensors)
        return made

    def own(self, tensor: torch.Tensor) -> int:
        number = self.add(tensor)
        self.memory[number] = spec_of(tensor)
        return number

    def compute(self, func: Any, args: Any, given: Any, named: Any, tensors: list[torch.Tensor]) -> None:
        found = out_form(func, self.device.type)
        if found is None and (call := out_call(schema_of(func).name, args, tensors, self.device.type)) is not None:
            found = call, ("out",)
        if found is None or not self.lies_well(func, given, tensors):
            self.fresh(NEW, func, given, named, tensors)
            return
        call, outs = found
        numbers = tuple(self.own(t) for t in tensors)
        if schema_of(func).name == "aten::native_batch_norm" and tensors[0].dtype in (torch.bfloat16, torch.float16):
            weight = named.get("weight", given[1] if len(given) > 1 else None)
            wide = self.device.type != "cpu" or weight is None or self.tensors[weight.number].dtype == torch.float32
            for number in numbers[1:] if wide else ():  # torch's own rule for tensors without memory says otherwise
                spec = self.memory[number]
                self.memory[number] = Spec(spec.shape, spec.strides, torch.float32)
        self.steps.append(Step(OUT, call, given, named, numbers, outs, torch.Tag.pointwise in func.tags))

    def lies_well(self, func: Any, given: Any, made: list[torch.Tensor]) -> bool:
        """Whether the `out=` kernel is right for these layouts: only those that go element by element take any."""
        if torch.Tag.pointwise in func.tags:
            return True
        asked = made if schema_of(func).name != "aten::native_batch_norm" else [self.tensors[given[0].number], *made]
        return all(
            t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)) for t in asked
        )

    def fresh(self, kind: str, func: Any, given: Any, named: Any, outputs: Sequence[Any]) -> None:
        numbers = tuple(self.own(t) if isinstance(t, torch.Tensor) else -1 for t in outputs)
        self.steps.append(Step(kind, func, given, named, numbers))

    def mutate(self, func: Any, args: Any, kwargs: Any, given: Any, named: Any) -> Any:
        made = func(*args, **kwargs)
        schema = schema_of(func)
        if torch.Tag.inplace_view in func.tags:
            self.problem = f"{schema.name} changes how a tensor lies"
            return made
        numbers: list[int] = []
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            found = kwargs.get(argument.name) if position >= len(args) else args[position]
            for tensor in found if isinstance(found, list | tuple) else (found,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                number = self.number_of[id(tensor)]
                root = self.root[number]
                if root not in self.memory:
                    self.problem = "it writes into an operand"
                    return made
                if not self.memory[root].bytes and tensor.numel():
                    self.memory[root] = spec_of(tensor)  # an empty result that the call has made large enough
                numbers.append(number)
        self.steps.append(Step(MUTATE, func, given, named, tuple(numbers), (), torch.Tag.pointwise in func.tags))
        return made


def as_kernels_lay_out(name: str, args: tuple[Any, ...], made: Any) -> Any:
    """Results of convolutions and BatchNorm as the libraries lay them out, which torch's rules for tensors without
    memory do not always say: channels last where an operand of the convolution has, as the input for BatchNorm."""
    if name == "aten::convolution_backward" and any(map(channels_last, args[:3])):
        return tuple(with_channels_last(t) for t in made)
    if name == "aten::convolution" and any(map(channels_last, args[:2])):
        return with_channels_last(made)
    if name in ("aten::native_batch_norm", "aten::native_batch_norm_backward"):
        x = args[0] if name == "aten::native_batch_norm" else args[1]
        return (with_channels_last(made[0]) if channels_last(x) else made[0], *made[1:])
    return made


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether channels, and not columns, are neighbours in memory."""
    last = _CHANNELS_LAST.get(tensor.dim())
    return last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def with_channels_last(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() not in _CHANNELS_LAST:
        return tensor
    order = (0, *range(2, tensor.dim()), 1)
    laid = row_major([tensor.shape[d] for d in order])
    return tensor.as_strided(tensor.shape, [laid[order.index(d)] for d in range(tensor.dim())])


def spec_of(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Operand:
    """What is known of an operand before it has memory; a Python number has no spec."""

    spec: Spec | None
    device: str


def trace(
    run: Callable[..., Any],
    operands: Sequence[Operand],
    results: Sequence[Spec],
    device: torch.device,
    mode: FakeTensorMode | None = None,
) -> tuple[Kernel, str]:
    """The kernel of a call, and why it could not be traced where it is run as a whole ("" where it was).

    `results` say shape and type of each result; where the call does not choose, they lie as given here. A mode that is
    given is used again: a new one costs more than many a call, since it writes down the whole stack.
    """
    mode = mode or FakeTensorMode()
    try:
        first = record(run, operands, device, mode, *_SENTINELS[0])
        if any(o.spec is None for o in operands):
            same_steps(first, record(run, operands, device, mode, *_SENTINELS[1]))
        return finish(first[0], first[1], operands, results), ""
    except Exception as error:  # it decides by data, or no kernel without memory is known: it still runs as it is
        reason = str(error) or type(error).__name__
    return whole(run, operands, results), reason.splitlines()[0][:200]


def record(
    run: Callable[..., Any],
    operands: Sequence[Operand],
    device: torch.device,
    mode: FakeTensorMode,
    base: float,
    stride: float,
) -> tuple[_Recorder, list[torch.Tensor]]:
    numbers = {base + stride * i: i for i, o in enumerate(operands) if o.spec is None}
    recorder = _Recorder(device, numbers)
    with mode, torch.no_grad():
        given: list[Any] = []
        for i, operand in enumerate(operands):
            if operand.spec is None:
                given.append(base + stride * i)
                recorder.add(torch.empty(0))
                continue
            s = operand.spec
            tensor = torch.empty_strided(s.shape, s.strides, dtype=s.dtype, device=operand.device)
            given.append(tensor)
            recorder.add(tensor)
        with recorder:
            made = run(*given)
    if recorder.problem:
        raise Untraceable(recorder.problem)
    return recorder, list(made) if isinstance(made, list | tuple) else [made]


def same_steps(first: Any, second: Any) -> None:
    """A number that was computed from a number of the host would be frozen into the kernel: such a call is refused."""
    for one, other in zip(first[0].steps, second[0].steps, strict=True):
        if one.args != other.args or one.kwargs != other.kwargs:
            raise Untraceable("it computes with numbers of the host")


def finish(recorder: _Recorder, made: list[Any], operands: Sequence[Operand], wanted: Sequence[Spec]) -> Kernel:
    """Gives every result memory of its own, and works out what may be written over what."""
    steps, memory, root = recorder.steps, recorder.memory, recorder.root
    if len(made) != len(wanted):
        raise Untraceable(f"it gives {len(made)} results instead of {len(wanted)}")
    results: list[int] = []
    specs: list[Spec] = []
    for tensor, want in zip(made, wanted, strict=True):
        if not isinstance(tensor, torch.Tensor):  # a result that nobody reads and that was not made
            results.append(-1)
            specs.append(want)
            continue
        if tuple(tensor.shape) != want.shape or tensor.dtype != want.dtype:
            raise Untraceable(f"it gives {tensor.dtype} {tuple(tensor.shape)} instead of {want.dtype} {want.shape}")
        number = recorder.number_of[id(tensor)]
        owner, spec = root[number], spec_of(tensor)
        whole_memory = (
            owner in memory
            and owner not in results
            and tensor.dtype == memory[owner].dtype
            and tensor.storage_offset() == 0
            and not tensor.is_conj()
            and not tensor.is_neg()
            and is_dense(spec.shape, spec.strides)
            and spec.bytes == memory[owner].bytes
        )
        if not whole_memory:
            spec = Spec(want.shape, row_major(want.shape), want.dtype)
            new = len(root)
            root.append(new)
            memory[new] = spec
            steps.append(Step(COPY, torch.Tensor.copy_, (Ref(new), Ref(number)), {}, (new,)))
            owner = new
        results.append(owner)
        specs.append(spec)
    kernel = Kernel(len(operands), steps, memory, results, specs)
    note_lives(kernel, root)
    return kernel


def note_lives(kernel: Kernel, root: list[int]) -> None:
    """When each memory is first written and last read, step by step."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(kernel.steps):
        used = {root[n] for n in step.reads()} | {root[n] for n in step.makes if n >= 0}
        for owner in used:
            if owner in kernel.memory and step.kind != VIEW:
                first.setdefault(owner, at)
            if step.kind != VIEW:
                last[owner] = at
    for owner in kernel.memory:
        if owner not in kernel.results and owner in first:
            kernel.scratch.append((owner, first[owner], last[owner] + 1))
    for result in kernel.results:
        kernel.over.append(
            frozenset(
                p for p in range(kernel.operands) if result >= 0 and may_take(kernel, root, result, p, first, last)
            )
        )


def may_take(
    kernel: Kernel, root: list[int], result: int, operand: int, first: dict[int, int], last: dict[int, int]
) -> bool:
    """Whether a result may be written where an operand lies: nothing reads the operand after its first write, and the
    operator that does both at once goes element by element or makes its result elsewhere first."""
    begun, read = first.get(result), last.get(operand, -1)
    if begun is None or read > begun:
        return False
    if read < begun:
        return True
    step = kernel.steps[begun]
    if step.kind == NEW:
        return True
    if any(root[n] == operand and n != operand for n in step.reads()):
        return False  # it sees the operand in another way, and would read what it has written
    if step.kind == OUT and has_in_place_form(step.call) and step.args[0] == Ref(operand):
        others: set[int] = set()
        collect((*step.args[1:], *step.kwargs.values()), others)
        return operand not in others
    return step.kind == COPY or (step.elementwise and len(step.makes) == 1)


def whole(run: Callable[..., Any], operands: Sequence[Operand], results: Sequence[Spec]) -> Kernel:
    """A call as one operator that makes its results itself."""
    count = len(operands)
    specs = [Spec(s.shape, row_major(s.shape), s.dtype) for s in results]
    numbers = tuple(range(count, count + len(specs)))
    given = tuple(Number(i) if o.spec is None else Ref(i) for i, o in enumerate(operands))
    step = Step(NEW, run, given, {}, numbers)
    kernel = Kernel(count, [step], dict(zip(numbers, specs, strict=True)), list(numbers), specs)
    kernel.over = [frozenset(range(count)) for _ in specs]
    return kernel


class Kernels:
    """The kernels of a program's calls. Equal calls are traced once, so repeated layers cost nothing more."""

    def __init__(self, device: torch.device):
        self.device = device
        self.mode = FakeTensorMode()
        self.known: dict[Any, Kernel] = {}
        #: names of ops whose calls could not be traced, and why
        self.untraced: dict[str, str] = {}

    def __call__(
        self,
        op: Op,
        run: Callable[..., Any],
        operands: Sequence[Operand],
        results: Sequence[Spec],
        used: tuple[bool, ...],
    ) -> Kernel:
        constants = tuple([repr(constant_value(v)) for v in op.operands])
        key = (op.definition, attribute_key(op), constants, tuple(operands), tuple(results), used)
        found = self.known.get(key)
        if found is None:
            found, why = trace(run, operands, results, self.device, self.mode)
            self.known[key] = found
            if why:
                self.untraced[op.name] = why
        return found


def attribute_key(op: Op) -> tuple[Any, ...]:
    """What tells one call of an op from another, as a hashable value."""
    return tuple(
        (k, v if type(v) is int or type(v) is str else repr(v)) for k, v in op.attributes.items() if k != "phase"
    )


def scratch_places(kernel: Kernel, used: Sequence[bool], alignment: int) -> tuple[dict[int, int], int]:
    """Offsets of what lives inside the kernel alone, results that nobody reads among it, and the bytes in all."""
    unread = {r for r, wanted in zip(kernel.results, used, strict=True) if not wanted}
    inner = [*kernel.scratch, *((r, 0, len(kernel.steps)) for r in sorted(unread) if r >= 0)]
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, int, int]] = []
    for number, first, last in sorted(inner, key=lambda i: (-kernel.memory[i[0]].bytes, i[0])):
        size = -(-kernel.memory[number].bytes // alignment) * alignment
        at = 0
        for low, high, begin, end in sorted(placed):
            if begin < last and first < end and at < high and low < at + size:
                at = high
        offsets[number] = at
        placed.append((at, at + size, first, last))
    return offsets, max((high for _, high, _, _ in placed), default=0)
