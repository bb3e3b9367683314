"""From an fx graph of ATen calls to step ops, call by call.

`import_graph` serves capture, traced gradients and traced optimizers alike. Handlers live in `aten_*.py`; what has none
becomes `step.opaque`. Views and in-place calls are made functional on the way (see references.py).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..dialects.step import StepBuilder, tensor_type
from ..dialects.step.opaque import encode_argument
from ..errors import CaptureError
from ..ir.core import UNKNOWN, Location, Op, Value
from ..ir.types import F32, F64, ScalarType, TensorType
from ..torch_private import HigherOrderOperator, OpOverload, schema_of, set_grad_marker, static_number
from .references import HIDDEN_CHANGE, Ref, fresh, has_history, view

Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
#: handlers that only move elements, and so take complex tensors as well
COMPLEX_TOO: set[str] = set()


def aten(*names: str, complex_too: bool = False) -> Callable[[Handler], Handler]:
    """Registers a handler for ATen overloads: `handler(imp, *args, **kwargs)`, tensors as values.

    An operator of our own is named in full, `wholestep.name.default`.

    `imp.b` is the builder and `imp.expected` the types the call must give. A handler returns a value, a sequence of
    them, or NotImplemented to leave the call to `step.opaque`. Complex tensors reach it only with `complex_too`.
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            if "." not in name:
                name += ".default"
            if name in HANDLERS:
                raise ValueError(f"two handlers for aten.{name}")
            HANDLERS[name] = handler
            if complex_too:
                COMPLEX_TOO.add(name)
        return handler

    return register


IGNORED = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "_functional_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_set_grad_enabled",
    "_autograd_enabled",
    "_linalg_check_errors",
}
#: calls that give back their input itself when there is nothing to do
MAYBE_ALIAS = {"reshape", "contiguous", "to", "flatten", "reshape_as", "type_as", "_unsafe_view", "float", "ravel"}
#: calls that give back their input itself when nothing is dropped, though their schema does not say so
MAYBE_INPUT = {
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
}
#: calls whose results are views of the tensors in a list, one by one
VIEWS_OF_LISTS = {"broadcast_tensors", "meshgrid"}
#: calls that update running statistics among their arguments, whatever their schema says
WITH_STATISTICS = {"batch_norm", "instance_norm"}
#: the same, for backends alone: their functional forms are those above
HIDDEN_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
#: arguments that say how eager keeps a gradient; a program's gradients are dense, and the same numbers
KEPT_SPARSE = ("sparse", "sparse_grad")
RANDOM_IN_PLACE = {"uniform_", "normal_", "bernoulli_", "exponential_"}


class Importer:
    """The state of one import: the builder, the values of the nodes, where random ops take their key from."""

    #: whether gradients may be asked for of what is imported
    differentiable = True

    def __init__(self, b: StepBuilder, random_key: Callable[[], Value] | None = None, strip: str = ""):
        self.b = b
        self.random_key = random_key
        self.strip = strip
        self.streams = 0
        self.no_grad = False
        self.expected: list[TensorType] = []
        self.env: dict[fx.Node, Any] = {}
        self.opaque_targets: dict[str, int] = {}
        #: ops that the user keeps out of mixed precision, by `torch.autocast(..., enabled=False)`
        self.exact: set[Op] = set()
        self._frames: dict[str, tuple[str, int]] = {}

    # ---- graph walking -----------------------------------------------------------------------------------------------

    def run(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Imports a graph. Inputs are Refs, values or constants in placeholder order; gives the outputs as Refs."""
        given = iter(inputs)
        outer = self.env
        self.env = {}
        result: Any = None
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                value = next(given)
                self.env[node] = fresh(value) if isinstance(value, Value) else value
            elif node.op == "get_attr":
                self.env[node] = self.get_attr(graph_module, node)
            elif node.op == "call_function":
                self.b.loc = self.location(node) or self.b.loc
                self.env[node] = self.call(node, graph_module)
            elif node.op == "output":
                result = self.resolve(node.args[0])
            else:
                raise CaptureError(f"the captured graph holds a {node.op} node ({node.target}), which is not expected")
        self.env = outer
        return result

    def get_attr(self, graph_module: fx.GraphModule, node: fx.Node) -> Any:
        found: Any = graph_module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if isinstance(found, torch.Tensor):
            return fresh(self.constant_tensor(found, str(node.target)))
        return found

    def constant_tensor(self, tensor: torch.Tensor, name: str) -> Value:
        """A tensor that the graph holds by value: only single numbers can be part of a program's text."""
        if tensor.numel() == 1 and not tensor.is_complex():
            return self.b.full(tensor.item(), tuple(tensor.shape), tensor_type(tensor).element)
        raise CaptureError(
            f"the graph holds the tensor constant {name} of shape {tuple(tensor.shape)}; "
            "register it as a buffer of the model (self.register_buffer) so that it becomes an input of the program"
        )

    def resolve(self, argument: Any) -> Any:
        """An fx argument with nodes replaced by what they stand for."""
        if isinstance(argument, fx.Node):
            return self.env[argument]
        if isinstance(argument, list | tuple):
            return [self.resolve(a) for a in argument]
        if isinstance(argument, dict):
            return {k: self.resolve(a) for k, a in argument.items()}
        if isinstance(argument, slice):
            return slice(self.resolve(argument.start), self.resolve(argument.stop), self.resolve(argument.step))
        return argument

    def read(self, argument: Any) -> Any:
        """Refs read to values, symbolic numbers to numbers, within any nesting."""
        if isinstance(argument, Ref):
            return argument.read(self.b)
        if isinstance(argument, list | tuple):
            return [self.read(a) for a in argument]
        if isinstance(argument, torch.SymInt):
            return concrete(argument)
        return argument

    # ---- calls -------------------------------------------------------------------------------------------------------

    def call(self, node: fx.Node, graph_module: fx.GraphModule) -> Any:
        target = node.target
        args, kwargs = self.resolve(node.args), self.resolve(node.kwargs)
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(target, HigherOrderOperator):
            return self.higher_order(node, target, args, kwargs)
        if not isinstance(target, OpOverload):
            return self.python_call(node, target, args, kwargs)
        packet = schema_of(target).name.split("::")[1]
        if packet in IGNORED:
            return None
        if packet.startswith("sym_"):
            return concrete(node.meta["val"])
        try:
            self.expected = expected_types(node, packet)
            if packet in HIDDEN_STATISTICS and args[5] and args[3] is not None:
                raise ValueError("it changes its running statistics unseen; call torch.nn.functional.batch_norm")
            if packet in WITH_STATISTICS:
                return self.functional_with_statistics(node, target, args, kwargs)
            if schema_of(target).is_mutable:
                return self.in_place(node, target, packet, args, kwargs)
            return self.functional(node, target, packet, args, kwargs)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CaptureError(f"{target}{self.b.loc.words}: {error}") from error

    def functional(self, node: fx.Node, target: Any, packet: str, args: Any, kwargs: Any) -> Any:
        values = self.read(args)
        named = {k: self.read(v) for k, v in kwargs.items()}
        base = args[0] if args and isinstance(args[0], Ref) else None
        source = values[0] if base is not None else None
        if packet.startswith("as_strided"):
            check_dense(node)
        out = self.emit(node, target, values, named)
        if packet in MAYBE_ALIAS:
            aliasing = base is not None and same_storage(node)
        else:
            aliasing = base is not None and (aliases_input(target) or (packet in MAYBE_INPUT and out is source))
        if self.no_grad:
            out = self.detached(out)
        if packet in VIEWS_OF_LISTS:
            parts = zip(args[0], values[0], out, strict=True)
            return [self.as_views(ref, value, part, target) for ref, value, part in parts]
        if not aliasing:
            return wrap(out)
        assert base is not None and source is not None
        return self.as_views(base, source, out, target)

    def detached(self, out: Any) -> Any:
        """Results without their history, as they are where gradients are switched off."""
        if isinstance(out, Value):
            return self.b.detach(out) if out.type.element.kind in ("float", "complex") else out
        return [self.detached(part) for part in out] if isinstance(out, list | tuple) else out

    def as_views(self, base: Ref, source: Value, out: Any, target: Any) -> Any:
        if isinstance(out, Value):
            found = view(base, source, out)
            return found or Ref(base.box, (), out, base.box.version, opaque_view=str(target))
        return [self.as_views(base, source, part, target) for part in out]

    def emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """The values of a call: by its handler, or as an opaque op."""
        args, kwargs = with_dense_gradients(target, args, kwargs)
        key = str(target).removeprefix("aten.")  # (operators of other namespaces keep theirs)
        handler = HANDLERS.get(key)
        if handler is not None and (key in COMPLEX_TOO or not any_complex(args, self.expected)):
            out = handler(self, *args, **kwargs)
            if out is not NotImplemented:
                check_types(target, out, self.expected)
                return out
        return self.opaque(node, target, args, kwargs)

    def opaque(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Any operator without a handler, as it is."""
        schema = schema_of(target)
        if schema.is_mutable:
            raise ValueError("this in-place operator has no functional form here; write it without the underscore")
        if torch.Tag.nondeterministic_seeded in target.tags and not draws_nothing(target, args, kwargs):
            raise ValueError(
                "this random operator is not part of the step dialect; draw with torch.rand, torch.randn or dropout"
            )
        if torch.Tag.dynamic_output_shape in target.tags and any(
            isinstance(d, torch.SymInt) and static_number(d) is None for t in meta_tensors(node) for d in t.shape
        ):
            raise ValueError("the shape of its result depends on the data; use a mask (torch.where) instead")
        operands: list[Value] = []

        def operand(value: Any) -> int | None:
            if not isinstance(value, Value):
                return None
            if value not in operands:
                operands.append(value)
            return operands.index(value)

        arguments = [encode_argument(a, operand) for a in args]
        keywords = {k: encode_argument(v, operand) for k, v in kwargs.items()}
        name = str(target)
        self.opaque_targets[name] = self.opaque_targets.get(name, 0) + 1
        results = self.b.opaque(
            operands, target=name, arguments=arguments, keywords=keywords, result_types=self.expected
        )
        flat = [results] if isinstance(results, Value) else list(results)
        return unflatten_like(node.meta["val"], iter(flat))

    def in_place(self, node: fx.Node, target: Any, packet: str, args: Any, kwargs: Any) -> Any:
        """A mutating call: its functional twin, then a write."""
        base = args[0]
        if packet in ("detach_", "requires_grad_"):
            if packet == "detach_":
                base.write(self.b, self.b.detach(base.read(self.b)))
            return base
        if isinstance(kwargs.get("out"), Ref):
            return self.into_out(node, target, args, kwargs)
        if not isinstance(base, Ref) or not packet.endswith("_") or packet.startswith("resize_"):
            raise ValueError("this operator changes one of its arguments; use its functional form")
        old = base.read(self.b)
        values = self.read(args)
        named = {k: self.read(v) for k, v in kwargs.items()}
        if torch.Tag.inplace_view in target.tags:
            overload, values, named = functional_twin(target, values, named)
            found = view(base, old, self.emit(node, overload, values, named))
            if found is None:
                raise ValueError(f"{packet} has no functional form; write it without the underscore")
            base.views, base.value, base.version = found.views, found.value, found.version
            return base
        self.expected = [old.type]
        new = self.twin(node, packet, target, old, values, named)
        new = self.b.broadcast_to(self.b.cast_to(new, old.type.element, rounds=True), old.type.shape)
        if self.no_grad:
            new = self.detached(new)
            if has_history(old):
                raise ValueError(HIDDEN_CHANGE)
        base.write(self.b, new)
        return base

    def into_out(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """A call with `out=`: its functional form, then a write."""
        named = {k: self.read(v) for k, v in kwargs.items() if k != "out"}
        base, values = kwargs["out"], self.read(args)
        overload = functional_of_out(target)
        self.expected = twin_types(overload, values, named)
        new, old = self.emit(node, overload, values, named), base.read(self.b)
        if new.type.shape != old.type.shape:
            raise ValueError("the tensor given as out= has another shape; leave out= away")
        if self.no_grad and has_history(old):
            raise ValueError(HIDDEN_CHANGE)
        new = self.detached(new) if self.no_grad else new
        base.write(self.b, self.b.cast_to(new, old.type.element, rounds=True))
        return base

    def twin(self, node: fx.Node, packet: str, target: Any, old: Value, values: Any, named: Any) -> Value:
        """What an in-place call would write."""
        b = self.b
        if packet == "copy_":
            return values[1]
        if packet == "zero_":
            return b.zeros_like(old)
        if packet == "fill_":
            filler = values[1]
            return filler if isinstance(filler, Value) else b.full(filler, old.type.shape, old.type.element)
        if packet in RANDOM_IN_PLACE:
            return self.random_in_place(packet, old, values[1:], named)
        overload, values, named = functional_twin(target, values, named)
        # the functional twin may promote; what is written back is cast to the tensor's own type
        self.expected = twin_types(overload, values, named) or [old.type]
        return self.emit(node, overload, values, named)

    def random_in_place(self, packet: str, old: Value, values: Any, named: Any) -> Value:
        b, type = self.b, old.type
        if packet == "uniform_":
            low = values[0] if values else named.get("from", 0.0)
            high = values[1] if len(values) > 1 else named.get("to", 1.0)
            return b.add(b.mul(self.random("uniform", type), high - low), low)
        if packet == "normal_":
            mean = values[0] if values else named.get("mean", 0.0)
            std = values[1] if len(values) > 1 else named.get("std", 1.0)
            return b.add(b.mul(self.random("normal", type), std), mean)
        if packet == "exponential_":
            return b.div(self.random("exponential", type), values[0] if values else named.get("lambd", 1.0))
        p = values[0] if values else named.get("p", 0.5)
        element = mask_element(type.element)
        draw = self.random("uniform", TensorType(type.shape, element))
        return b.cast_to(b.lt(draw, b.cast_to(p, element) if isinstance(p, Value) else p), type.element)

    def random(self, distribution: str, type: TensorType) -> Value:
        """Random numbers with a stream of their own: no two calls of a program draw the same."""
        if self.random_key is None:
            raise ValueError("random numbers cannot be drawn here")
        if type.element.kind != "float":
            raise ValueError("draw the real and the imaginary part and join them with torch.complex")
        self.streams += 1
        return self.b.random(self.random_key(), distribution=distribution, stream=self.streams, type=type)

    def functional_with_statistics(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Batch norm: its running statistics are read, and written back where it trains."""
        out, statistics = HANDLERS[str(target).removeprefix("aten.")](
            self, *self.read(args), **{k: self.read(v) for k, v in kwargs.items()}
        )
        for ref, value in zip(args[3:5], statistics, strict=True):
            if isinstance(ref, Ref) and value is not None:
                ref.write(self.b, value)
        check_types(target, out, self.expected)
        return wrap(self.detached(out) if self.no_grad else out)

    def higher_order(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Regions of the user's code: no_grad and autocast wrappers are imported in place."""
        name = target.name()
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inner = args
            outer, self.no_grad = self.no_grad, not enabled
            out = self.run(body, inner)
            self.no_grad = outer
            return out
        if name == "wrap_with_autocast":
            _, _, enabled, _, body, *inner = args
            if enabled:
                raise CaptureError(
                    f"torch.autocast is enabled inside the model at {self.b.loc}; "
                    "take it out and let Wholestep choose precisions"
                )
            last = self.b.block.last
            out = self.run(body, inner)
            op = self.b.block.first if last is None else last.next
            while op is not None:
                self.exact.add(op)
                op = op.next
            return out
        if name in ("tag_activation_checkpoint", "wrap_activation_checkpoint", "invoke_subgraph"):
            body = next(a for a in args if isinstance(a, fx.GraphModule))
            inner = [a for a in args if not isinstance(a, fx.GraphModule | str)]
            return self.run(body, inner)
        raise CaptureError(
            f"{name} at {self.b.loc}: control flow that depends on data is not part of a static program; "
            "compute both branches and choose with torch.where"
        )

    def python_call(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        """Arithmetic on sizes: done now, since sizes are static."""
        if "val" in node.meta and isinstance(node.meta["val"], torch.SymInt | torch.SymBool | torch.SymFloat):
            return concrete(node.meta["val"])
        if target is set_grad_marker:  # a marker without a result
            self.no_grad = not args[0]
            return None
        name = getattr(target, "__name__", str(target))
        if all(isinstance(a, bool | int | float) for a in args):
            return target(*args, **kwargs)
        func = "vmap" in name or "functorch" in name
        instead = "; write out what torch.func (vmap, grad) does with ordinary batched operations" if func else ""
        raise CaptureError(f"{name}{self.b.loc.words} cannot be part of a static program{instead}")

    # ---- where it comes from -----------------------------------------------------------------------------------------

    def location(self, node: fx.Node) -> Location | None:
        """Module path and user line of a node."""
        stack = node.meta.get("nn_module_stack")
        layer = ""
        if stack:
            layer = list(stack.values())[-1][0]
            layer = layer if isinstance(layer, str) else str(layer)
            layer = re.sub(r"^L\['self'\]\.?", "", layer)
            layer = layer.removeprefix(self.strip).lstrip(".") if layer.startswith(self.strip) else layer
        trace = node.meta.get("stack_trace")
        file, line = self.frame(trace) if trace else ("", 0)
        if not layer and not file:
            return None
        return Location(layer, file, line)

    def frame(self, trace: str) -> tuple[str, int]:
        """The innermost line of the user's code in a stack trace: the last frame outside torch."""
        found = self._frames.get(trace)
        if found is None:
            frames = _FRAME.findall(trace)
            own = [f for f in frames if "/torch/" not in f[0] and "/wholestep/" not in f[0]] or frames
            found = (own[-1][0], int(own[-1][1])) if own else ("", 0)
            self._frames[trace] = found
        return found


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def import_graph(b: StepBuilder, graph_module: fx.GraphModule, inputs: Sequence[Value]) -> list[Value | None]:
    """Imports a graph whose placeholders are these values; gives the values of its outputs, flat."""
    importer = Importer(b)
    out = importer.run(graph_module, list(inputs))
    flat = out if isinstance(out, list) else [out]
    return [r.read(b) if isinstance(r, Ref) else r for r in flat]


# ---- small helpers ---------------------------------------------------------------------------------------------------


def concrete(value: Any) -> Any:
    """A symbolic number as a number; ValueError where it is known only at run time."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        number = static_number(value)
        if number is None:
            raise ValueError("a size depends on the data")
        return number
    return value


def draws_nothing(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random operator is called with a dropout probability of zero."""
    names = [a.name for a in schema_of(target).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return any(given.get(name) == 0 for name in ("dropout", "dropout_p", "p") if name in given)


def with_dense_gradients(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    names = [a.name for a in schema_of(target).arguments]
    if not any(name in KEPT_SPARSE for name in names):
        return args, kwargs
    args = [False if name in KEPT_SPARSE else value for name, value in zip(names, args, strict=False)]
    return args, {name: value for name, value in kwargs.items() if name not in KEPT_SPARSE}


def wrap(out: Any) -> Any:
    return fresh(out) if isinstance(out, Value) else [wrap(v) for v in out] if isinstance(out, list | tuple) else out


def meta_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node gives, flat."""
    out: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, list | tuple):
            for v in value:
                walk(v)

    walk(node.meta.get("val"))
    return out


def expected_types(node: fx.Node, packet: str) -> list[TensorType]:
    types = []
    for t in meta_tensors(node):
        if any(isinstance(d, torch.SymInt) and static_number(d) is None for d in t.shape):
            raise CaptureError(
                f"{node.target}: the shape of its result depends on the data, which a static program cannot have; "
                "use a mask (torch.where) or a fixed size instead" + where(node)
            )
        types.append(tensor_type(t))
    return types


def where(node: fx.Node) -> str:
    """` (file:line)` of a node, if known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return f" ({own[-1][0]}:{own[-1][1]})" if own else ""


def unflatten_like(shape: Any, flat: Any) -> Any:
    """Flat values arranged as the fake result is."""
    if isinstance(shape, torch.Tensor):
        return next(flat)
    if isinstance(shape, list | tuple):
        return [unflatten_like(s, flat) for s in shape]
    return None


def any_complex(args: Any, expected: list[TensorType]) -> bool:
    if any(t.element.kind == "complex" for t in expected):
        return True

    def walk(value: Any) -> bool:
        if isinstance(value, Value):
            return value.type.element.kind == "complex"
        if isinstance(value, complex):
            return True
        return isinstance(value, list | tuple) and any(walk(v) for v in value)

    return walk(args)


def check_types(target: Any, out: Any, expected: list[TensorType]) -> None:
    """A handler must give exactly the types that torch gives; anything else is a bug of ours, said loudly."""
    flat: list[Value] = []

    def walk(value: Any) -> None:
        if isinstance(value, Value):
            flat.append(value)
        elif isinstance(value, list | tuple):
            for v in value:
                walk(v)

    walk(out)
    got = [v.type for v in flat]
    if got != expected:
        raise CaptureError(f"internal error: {target} was captured as {got} but torch gives {expected}")


def aliases_input(target: Any) -> bool:
    """Whether the operator's schema says that a result shares storage with its first argument."""
    first = schema_of(target).arguments[0].alias_info if schema_of(target).arguments else None
    return first is not None and not first.is_write


def same_storage(node: fx.Node) -> bool:
    """Whether a call that may give back its input or a view of it does so here, judged by shapes and strides."""
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    result = node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if source.dtype != result.dtype or source.device != result.device:
        return False
    if given_arguments(node).get("copy"):
        return False
    probe = torch.empty_strided(
        [concrete(d) for d in source.shape], [concrete(d) for d in source.stride()], dtype=source.dtype, device="meta"
    )
    if source.shape == result.shape and source.stride() == result.stride():
        return True
    try:
        seen = probe.view([concrete(d) for d in result.shape])
    except RuntimeError:
        return False
    return list(seen.stride()) == [concrete(d) for d in result.stride()]


def given_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's call by name."""
    names = [a.name for a in schema_of(node.target).arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def check_dense(node: fx.Node) -> None:
    """as_strided counts in memory: it means the same in a program of values only where its input is dense in memory."""
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, torch.Tensor) or not source.is_contiguous() or concrete(source.storage_offset()):
        raise ValueError("as_strided of a tensor that is itself a view of memory; write it with slices and transposes")


def functional_twin(target: Any, values: Any, named: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The functional form of an in-place operator, and its arguments in the order it takes them."""
    own = {a.name: str(a.type) for a in schema_of(target).arguments}
    name = schema_of(target).name.split("::")[1][:-1]
    packet = getattr(getattr(torch.ops, target.namespace), name, None)
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    overloads = [o for o in overloads if not schema_of(o).is_mutable]
    overloads.sort(key=lambda o: o._overloadname != target._overloadname)  # the same name first
    for found in overloads:
        if [str(a.type) for a in schema_of(found).arguments] == list(own.values()):
            return found, values, named
    for found in overloads:  # polygamma takes its arguments in another order
        arguments = schema_of(found).arguments
        if {a.name: str(a.type) for a in arguments} == own and not any(a.kwarg_only for a in arguments):
            given = dict(zip(own, values, strict=False)) | named
            return found, [given.get(a.name, a.default_value) for a in arguments], {}
    raise ValueError(f"{name}_ has no functional form; write it without the underscore")


def functional_of_out(target: Any) -> Any:
    """The overload of an operator that returns what this one writes to `out=`."""
    own = [(a.name, str(a.type)) for a in schema_of(target).arguments if not a.is_out]
    packet = target.overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        if not schema_of(found).is_mutable and [(a.name, str(a.type)) for a in schema_of(found).arguments] == own:
            return found
    raise ValueError("this operator has no form without out=")


def twin_types(overload: Any, values: Any, named: Any) -> list[TensorType]:
    """Result types of a functional call, from torch's own shape functions on meta tensors."""
    from ..dialects.step import torch_dtype

    def meta(value: Any) -> Any:
        if isinstance(value, Value):
            return torch.empty(value.type.shape, dtype=torch_dtype(value.type.element), device="meta")
        if isinstance(value, list | tuple):
            return [meta(v) for v in value]
        return value

    out = overload(*meta(values), **{k: meta(v) for k, v in named.items()})
    return [tensor_type(out)]


def mask_element(element: ScalarType) -> ScalarType:
    """The type in which a random mask over tensors of this type is drawn: float32, or float64 for float64."""
    return F64 if element is F64 else F32


def location_of(value: Value) -> Location:
    return value.op.loc if value.op is not None else UNKNOWN
