"""From an ONNX graph to step ops, node by node.

Shapes are static, so whatever is computed from shapes is a constant: a node whose inputs are all known is computed at
once, by its own rule in a little program. Functions and subgraphs are imported in place. Limits keep a hostile or
broken file from asking for unbounded memory or time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, defs

from ..dialects.step import torch_dtype
from ..errors import WholestepError
from ..ir.builtin import finish_function
from ..ir.core import Location, Op, Value
from ..ir.verify import declared_problem
from .context import Context, Item, Items, Program, Rule, Tensor
from .dtypes import element_of, onnx_type, schema_type, type_name
from .errors import DataDependentError, OnnxError, OnnxGraphError, OnnxLimitError, OnnxUnsupportedError
from .files import Model, opset_versions, plain_domain
from .operators import nearest, rule_for
from .tensors import read_tensor
from .text import Text, array_of, read_text

#: domains that are part of ONNX but not of networks that are trained
REFUSED_DOMAINS = {
    "ai.onnx.ml": "classical machine learning (trees, encoders, strings)",
    "ai.onnx.preview.training": "training algorithms inside the graph; give ws.compile a torch optimizer instead",
    "ai.onnx.training": "training algorithms inside the graph; give ws.compile a torch optimizer instead",
}
#: operators that only move, count or compare elements, so that numbers can stand for strings
MOVES_ELEMENTS = frozenset((
    "Concat", "Equal", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Shape",
    "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
MAX_DEPTH = 40
#: torch has no tensors of more dimensions
MAX_RANK = 64
VARIADIC = defs.OpSchema.FormalParameterOption.Variadic


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a graph may ask for while it is imported."""

    #: nodes, counting those of functions and loops each time they are imported
    nodes: int = 100_000
    #: rounds of one Loop or Scan
    rounds: int = 2_000
    #: bytes that one node may take to be computed at import; a larger one is left to the program
    folded_bytes: int = 1 << 26
    #: the same for all nodes together
    all_folded_bytes: int = 1 << 32
    #: floating-point operations of one node that is computed at import
    folded_flops: int = 1 << 30
    #: bytes of one tensor of the program
    tensor_bytes: int = 1 << 38


class Scope:
    """Names and what they stand for; an inner graph sees the outer one's names."""

    def __init__(self, outer: Scope | None = None, attributes: dict[str, Any] | None = None):
        self.names: dict[str, Item] = {}
        self.outer = outer
        #: in a function: the attributes of its call
        self.attributes: dict[str, Any] = attributes or (outer.attributes if outer is not None else {})
        self.opsets: dict[str, int] = outer.opsets if outer is not None else {}

    def find(self, name: str) -> tuple[bool, Item]:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return True, scope.names[name]
            scope = scope.outer
        return False, None

    def define(self, name: str, item: Item, where: str) -> None:
        if name in self.names:
            raise OnnxGraphError(f"{where}: the name {name!r} is given twice")
        self.names[name] = item


class Walk:
    """One import of a graph into a program."""

    def __init__(
        self, model: Model, program: Program, training: bool | None, limits: Limits, buffers: Collection[str] = ()
    ):
        self.model, self.program, self.training, self.limits = model, program, training, limits
        self.buffers = buffers
        #: new values of buffers, by the name of the initializer
        self.updates: dict[str, Value] = {}
        self.count = 0
        self.folded = 0
        self.scope = Scope()
        self.scope.opsets = model.opsets
        self._active: list[Any] = []

    def is_buffer(self, name: str) -> bool:
        return name in self.buffers

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def run(self, items: dict[str, Item], outputs: Sequence[str]) -> list[Item]:
        """Imports the model's graph; `items` are its inputs and initializers by name."""
        self.scope.names.update(items)
        try:
            self.nodes(self.model.proto.graph.node)
        except RecursionError:
            raise OnnxLimitError("the graph is nested too deeply") from None
        return [self.lookup(name, "the outputs of the graph") for name in outputs]

    def nodes(self, nodes: Sequence[Any]) -> None:
        for index, node in enumerate(nodes):
            self.node(node, describe(node, index))

    def lookup(self, name: str, where: str) -> Item:
        there, item = self.scope.find(name)
        if not there:
            raise OnnxGraphError(
                f"{where}: {name!r} is used, but no input, initializer or earlier node gives it; the graph has a "
                "cycle, is not in order, or is incomplete"
            )
        return item

    @contextmanager
    def inner(self, scope: Scope, what: Any) -> Iterator[None]:
        """Names are those of `scope` while the block runs."""
        if len(self._active) >= MAX_DEPTH:
            raise OnnxLimitError(f"functions and subgraphs are nested more than {MAX_DEPTH} deep")
        self._active.append(what)
        outer, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = outer
            self._active.pop()

    def subgraph(self, graph: Any, inputs: Sequence[Item]) -> list[Item]:
        """Imports a subgraph of a node; it sees the names around it."""
        if len(graph.input) != len(inputs):
            raise OnnxGraphError(f"subgraph {graph.name!r} takes {len(graph.input)} inputs, not {len(inputs)}")
        scope = Scope(self.scope)
        where = f"subgraph {graph.name!r}"
        for formal, item in zip(graph.input, inputs, strict=True):
            scope.define(formal.name, item, where)
        for tensor in graph.initializer:
            constant = self.read(tensor)
            known = isinstance(constant, np.ndarray)
            item = Text(constant) if known else Tensor(self.program, tensor.data_type, constant=constant)
            scope.define(tensor.name, item, where)
        if graph.sparse_initializer:
            raise OnnxUnsupportedError(f"{where} has sparse initializers, which are not supported")
        with self.inner(scope, None):
            self.nodes(graph.node)
            return [self.lookup(o.name, where) for o in graph.output]

    def function(
        self, function: Any, inputs: Sequence[Item], attributes: dict[str, Any], outputs: Sequence[str], where: str
    ) -> list[Item]:
        """Imports the body of a function in place of its call; outputs that the call does not name are left out."""
        key = (plain_domain(function.domain), function.name, function.overload)
        if key in self._active:
            raise OnnxGraphError(f"{where}: the function {function.name} calls itself")
        if len(inputs) > len(function.input):
            raise OnnxGraphError(f"{where}: the function takes {len(function.input)} inputs, not {len(inputs)}")
        given = {a.name: a for a in function.attribute_proto} | attributes
        scope = Scope(attributes=given)
        scope.opsets = opset_versions(function.opset_import) or self.scope.opsets
        if "" not in scope.opsets:  # ONNX's own functions in other domains do not always say it
            scope.opsets = {"": defs.onnx_opset_version()} | scope.opsets
        for index, name in enumerate(function.input):
            scope.define(name, inputs[index] if index < len(inputs) else None, where)
        with self.inner(scope, key):
            self.nodes(function.node)
            named = zip(function.output, outputs, strict=False)
            return [self.lookup(name, where) if output else None for name, output in named]

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def node(self, node: Any, where: str) -> None:
        self.count += 1
        if self.count > self.limits.nodes:
            raise OnnxLimitError(f"{where}: the graph has more than {self.limits.nodes} nodes, loops counted as often")
        layer = node.name or next((o for o in node.output if o), "") or node.op_type
        self.program.b.loc = Location(layer.strip("/").replace("/", "."))
        inputs = [self.lookup(name, where) if name else None for name in node.input]
        results = self.call(node, inputs, where)
        for index, name in enumerate(node.output):
            if not name:
                continue
            if index >= len(results):
                raise OnnxGraphError(f"{where}: it has {len(results)} outputs, but {len(node.output)} are named")
            self.scope.define(name, results[index], where)

    def call(self, node: Any, inputs: list[Item], where: str) -> list[Item]:
        domain = plain_domain(node.domain)
        function = self.model.functions.get((domain, node.op_type, node.overload))
        if function is not None:
            return self.function(function, inputs, self.own_attributes(node), node.output, where)
        schema, version = self.schema(node, domain, where)
        attributes = self.attributes(node, schema, where)
        types = check_inputs(schema, inputs, where)
        context = Context(self, self.program, node, schema, version, attributes, where)
        if any(has_text(item) for item in inputs):
            results = self.call_on_text(context, domain, inputs, types)
            return check_outputs(self.program, results, schema, types, where)
        found = rule_for(domain, node.op_type, schema.since_version)
        if found is None:
            body = self.schema_function(node, schema, inputs)
            if body is None:
                similar = nearest(node.op_type)
                raise OnnxUnsupportedError(
                    f"{where}: version {schema.since_version} of this operator is not supported"
                    + (f"\nTry: {similar}, the nearest operator that is" if similar not in ("", node.op_type) else "")
                )
            return self.function(body, inputs, self.own_attributes(node, schema), node.output, where)
        padded = inputs + [None] * (0 if schema.is_infinite_ else schema.max_input_ - len(inputs))
        results = self.apply(found.rule, context, padded, found.folds)
        return check_outputs(self.program, results, schema, types, where)

    def call_on_text(self, context: Context, domain: str, inputs: Sequence[Item], types: dict[str, int]) -> Any:
        """The outputs of a node that takes text, computed now."""
        found = rule_for(domain, context.name, context.version, text=True)
        if found is not None:
            return self.run_rule(found.rule, context, inputs)
        found = rule_for(domain, context.name, context.version)
        plain = not any(isinstance(item, Items) for item in inputs)
        if found is None or domain or context.name not in MOVES_ELEMENTS or not plain:
            raise context.unsupported("this operator is not supported for text", "do this to the data")
        unknown = [item for item in inputs if not is_known(item)]
        if unknown:
            raise DataDependentError(
                f"{context.where}: the text that it gives depends on the data, and text must be known at import",
                frozenset(name for item in unknown for name in origin_of(item)),
            )
        return self.text_by_numbers(found.rule, context, inputs, types)

    def text_by_numbers(self, rule: Rule, context: Context, inputs: Sequence[Item], types: dict[str, int]) -> Any:
        """Runs the rule of an operator that moves or compares elements on numbers, one for each different string."""
        numbers: dict[str, int] = {}
        given: list[Item] = []
        for item in inputs:
            if isinstance(item, Text):
                listed = [numbers.setdefault(word, len(numbers)) for word in item.array.reshape(-1)]
                constant = torch.tensor(listed, dtype=torch.int64).reshape(item.shape)
                item = Tensor(self.program, TensorProto.INT64, constant=constant)
            given.append(item)
        schema = context.schema
        given += [None] * (0 if schema.is_infinite_ else schema.max_input_ - len(given))
        results = self.fold(rule, context, given)
        if results is None:
            raise OnnxLimitError(f"{context.where}: it makes too much text at import")
        words = array_of(numbers, [len(numbers)])
        out: list[Item] = []
        for index, item in enumerate(results if isinstance(results, list) else [results]):
            formal = schema.outputs[min(index, len(schema.outputs) - 1)]
            if types.get(formal.type_str) == TensorProto.STRING and item is not None:
                positions = item.constant.numpy()
                out.append(context.text(array_of(words[positions.reshape(-1)], positions.shape)))
            else:
                out.append(item)
        return out

    def schema(self, node: Any, domain: str, where: str) -> tuple[Any, int]:
        if domain in REFUSED_DOMAINS:
            raise OnnxUnsupportedError(f"{where}: the domain {domain} is not supported: {REFUSED_DOMAINS[domain]}")
        version = self.scope.opsets.get(domain)
        if version is None:
            known = ", ".join(d or "ai.onnx" for d in self.scope.opsets)
            raise OnnxGraphError(
                f"{where}: the model does not say which version of {domain or 'ai.onnx'} it uses ({known})"
            )
        try:
            schema = defs.get_schema(node.op_type, version, domain)
        except defs.SchemaError:
            similar = nearest(node.op_type)
            raise OnnxUnsupportedError(
                f"{where}: there is no operator {node.op_type!r} in {domain or 'ai.onnx'} {version}"
                + (f"; the nearest supported one is {similar}" if similar else "")
                + "\nTry: export the model with operators of ONNX alone, or with the operator's function in the file"
            ) from None
        if schema.deprecated:
            raise OnnxUnsupportedError(
                f"{where}: this operator is deprecated in opset {version}; export the model again"
            )
        return Schema(schema), version

    def own_attributes(self, node: Any, schema: Any = None) -> dict[str, Any]:
        """The attributes of a node as they stand, references to those of the function around it replaced."""
        found: dict[str, Any] = {}
        if schema is not None:
            for name, declared in schema.attributes.items():
                if declared.default_value.name:
                    found[name] = declared.default_value
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                found[attribute.name] = attribute
                continue
            outer = self.scope.attributes.get(attribute.ref_attr_name)
            if outer is not None:
                copy = AttributeProto()
                copy.CopyFrom(outer)
                copy.name = attribute.name
                found[attribute.name] = copy
        return found

    def attributes(self, node: Any, schema: Any, where: str) -> dict[str, Any]:
        """The values of a node's attributes, checked against the schema."""
        given = self.own_attributes(node)
        found: dict[str, Any] = {}
        for name, attribute in given.items():
            declared = schema.attributes.get(name)
            if declared is None:
                raise OnnxGraphError(
                    f"{where}: it has an attribute {name!r}, which version {schema.since_version} does not know"
                )
            if int(declared.type.value) != attribute.type:
                raise OnnxGraphError(f"{where}: its attribute {name!r} is not of the kind {declared.type.name}")
            found[name] = self.attribute_value(attribute, where)
        for name, declared in schema.attributes.items():
            if name in found:
                continue
            if declared.required:
                raise OnnxGraphError(f"{where}: its attribute {name!r} is missing")
            if declared.default_value.name:
                found[name] = self.attribute_value(declared.default_value, where)
        return found

    def attribute_value(self, attribute: Any, where: str) -> Any:
        kind, a = attribute.type, attribute
        try:
            if kind == AttributeProto.STRING:
                return a.s.decode("utf-8")
            if kind == AttributeProto.STRINGS:
                return [s.decode("utf-8") for s in a.strings]
        except UnicodeDecodeError:
            raise OnnxGraphError(f"{where}: its attribute {a.name!r} is not text") from None
        if kind == AttributeProto.TENSOR:
            return self.read(a.t)
        if kind == AttributeProto.TENSORS:
            return [self.read(t) for t in a.tensors]
        plain = {
            AttributeProto.FLOAT: "f", AttributeProto.INT: "i", AttributeProto.GRAPH: "g",
            AttributeProto.SPARSE_TENSOR: "sparse_tensor", AttributeProto.TYPE_PROTO: "tp",
        }  # fmt: skip
        if kind in plain:
            return getattr(a, plain[kind])
        lists = {AttributeProto.FLOATS: "floats", AttributeProto.INTS: "ints", AttributeProto.GRAPHS: "graphs"}
        if kind in lists:
            return list(getattr(a, lists[kind]))
        raise OnnxUnsupportedError(f"{where}: its attribute {a.name!r} is of a kind that is not supported")

    def read(self, proto: Any) -> Any:
        """A tensor of the file: a torch tensor, or a numpy array where it is text."""
        return read_text(proto) if proto.data_type == TensorProto.STRING else read_tensor(proto, self.model.folder)

    def schema_function(self, node: Any, schema: Any, inputs: Sequence[Item]) -> Any:
        """The function by which ONNX itself defines an operator; None where it has none."""
        version = self.scope.opsets[plain_domain(node.domain)]
        found = None
        if schema.has_function:
            versions = [v for v in schema.function_opset_versions if v <= version]
            if versions:
                found = schema.get_function_with_opset_version(max(versions))
        elif schema.has_context_dependent_function:
            versions = [v for v in schema.context_dependent_function_opset_versions if v <= version]
            if versions:
                plain = onnx.NodeProto()
                plain.CopyFrom(node)
                del plain.attribute[:]
                plain.attribute.extend(self.own_attributes(node).values())
                types = [type_proto(item).SerializeToString() for item in inputs]
                found = schema.get_context_dependent_function_with_opset_version(
                    max(versions), plain.SerializeToString(), types
                )
        if found is None or isinstance(found, onnx.FunctionProto):
            return found
        body = onnx.FunctionProto()
        body.ParseFromString(found)
        return body

    # ---- rules -------------------------------------------------------------------------------------------------------

    def apply(self, rule: Rule, context: Context, inputs: Sequence[Item], folds: bool = True) -> Any:
        """Runs a rule: at import where all inputs are known, else into the program."""
        origin = frozenset(name for item in inputs for name in origin_of(item))
        if folds and all(is_known(item) for item in inputs):
            found = self.fold(rule, context, inputs)
            if found is not None:
                return with_origin(self.program, found, origin)
        last = self.program.block.last
        out = self.run_rule(rule, context, inputs)
        first = self.program.block.first if last is None else last.next
        self.check_ops(first, context.where)
        return with_origin(self.program, out, origin)

    def run_rule(self, rule: Rule, context: Context, inputs: Sequence[Item]) -> Any:
        try:
            return rule(context, *inputs)
        except (WholestepError, RecursionError):
            raise
        except MemoryError:
            raise OnnxLimitError(f"{context.where}: there is not enough memory to import it") from None
        except (
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            ArithmeticError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise OnnxGraphError(f"{context.where}: {str(error).splitlines()[0] if str(error) else error!r}") from error

    def fold(self, rule: Rule, context: Context, inputs: Sequence[Item]) -> Any:
        """The results of a rule on known inputs, computed now; None where that is too much or random."""
        little = Program()
        little.b.loc = self.program.b.loc
        inside = Context(self, little, context.node, context.schema, context.opset, context.attributes, context.where)
        results = self.run_rule(rule, inside, [moved(item, little) for item in inputs])
        if any(s.kind == "key" for s in little.sources):
            return None
        wanted: dict[Value, None] = {}
        for value in values_of(results):
            wanted[value] = None
        if not wanted:
            return replaced(results, {}, self.program)
        if not self.affordable(little.block.first):
            return None
        self.check_ops(little.block.first, context.where)
        finish_function(little.function, list(wanted))
        from ..runtime.executor import Executable

        given = [s.tensor for s in little.sources]
        try:
            made = Executable(little.function)(given)  # type: ignore[arg-type]
        except (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError, WholestepError) as error:
            raise OnnxGraphError(f"{context.where}: {str(error).splitlines()[0]}") from error
        known = {v: t.contiguous() for v, t in zip(wanted, made, strict=True)}
        return replaced(results, known, self.program)

    def affordable(self, first: Op | None) -> bool:
        """Whether ops are small enough to be computed at import."""
        bytes = flops = 0
        op = first
        while op is not None:
            bytes += sum(r.type.bytes for r in op.results)
            flops += op.definition.flops(op)  # type: ignore[attr-defined]
            op = op.next
        if bytes > self.limits.folded_bytes or flops > self.limits.folded_flops:
            return False
        self.count_folded(bytes)
        return True

    def afford(self, bytes: int, where: str, counted: bool = True) -> None:
        """Text that is made at import: an error where it is too much."""
        if bytes > self.limits.folded_bytes:
            raise OnnxLimitError(f"{where}: it makes {bytes} bytes at import, more than {self.limits.folded_bytes}")
        if counted:
            self.count_folded(bytes)

    def count_folded(self, bytes: int) -> None:
        self.folded += bytes
        if self.folded > self.limits.all_folded_bytes:
            raise OnnxLimitError(
                f"constants of the graph take more than {self.limits.all_folded_bytes} bytes to be computed\n"
                "Try: fold them in the exporter (constant folding) and store the results as initializers"
            )

    def check_ops(self, first: Op | None, where: str) -> None:
        """Ops that a rule made: each keeps the rules of the dialect and is of a sane size."""
        op = first
        while op is not None:
            for result in op.results:
                if result.type.rank > MAX_RANK:
                    raise OnnxLimitError(f"{where}: it makes a tensor of {result.type.rank} dimensions")
                if result.type.bytes > self.limits.tensor_bytes:
                    raise OnnxLimitError(
                        f"{where}: it makes a tensor of shape {list(result.type.shape)}, more than "
                        f"{self.limits.tensor_bytes >> 30} GiB"
                    )
            problem = declared_problem(op) or op.definition.check(op)
            if problem:
                raise OnnxGraphError(f"{where}: {problem}")
            op = op.next


class Schema:
    """An operator's schema, with its lists read once (they are made anew each time they are asked for)."""

    def __init__(self, schema: Any):
        self.plain = schema
        self.since_version = schema.since_version
        self.inputs, self.outputs, self.attributes = list(schema.inputs), list(schema.outputs), dict(schema.attributes)
        self.min_input_, self.max_input_ = schema.min_input, schema.max_input
        self.is_infinite_ = bool(self.inputs) and self.inputs[-1].option == VARIADIC
        self.constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_inputs(schema: Schema, inputs: Sequence[Item], where: str) -> dict[str, int]:
    """Checks number and types of a node's inputs; gives the ONNX type that each type letter stands for."""
    if not schema.min_input_ <= len(inputs) <= schema.max_input_:
        raise OnnxGraphError(f"{where}: it has {len(inputs)} inputs, not {schema.min_input_} to {schema.max_input_}")
    types: dict[str, int] = {}
    for index, item in enumerate(inputs):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if item is None:
            option = defs.OpSchema.FormalParameterOption
            if formal.option in (option.Single, option.Variadic) and "optional" not in str(formal.types):
                raise OnnxGraphError(f"{where}: its input {formal.name} is missing")
            continue
        letter = formal.type_str
        allowed = schema.constraints.get(letter, {letter})
        text = type_text(item)
        if text is not None and text not in allowed and f"optional({text})" not in allowed:
            raise OnnxGraphError(f"{where}: its input {formal.name} is {text}, which it does not take")
        if isinstance(item, Tensor | Text) and letter in schema.constraints:
            same = formal.option != VARIADIC or formal.is_homogeneous
            if same and types.setdefault(letter, item.type) != item.type:
                raise OnnxGraphError(
                    f"{where}: its inputs are of different types, {type_name(types[letter])} and {type_name(item.type)}"
                )
    return types


def check_outputs(program: Program, results: Any, schema: Schema, types: dict[str, int], where: str) -> list[Item]:
    """What a rule gave as items, one per output, with the ONNX types that the schema says."""
    listed = list(results) if isinstance(results, list | tuple) and not isinstance(results, Items) else [results]
    out: list[Item] = []
    for index, item in enumerate(listed):
        formal = schema.outputs[min(index, len(schema.outputs) - 1)]
        if isinstance(item, Tensor):
            wanted = types.get(formal.type_str)
            if wanted is not None and wanted != item.type:
                if element_of(wanted) is not item.element:
                    raise OnnxError(
                        f"{where}: internal error: output {formal.name} is {item}, but must be {type_name(wanted)}"
                    )
                item.type = wanted
            allowed = schema.constraints.get(formal.type_str, {formal.type_str})
            if (
                allowed
                and schema_type(item.type) not in allowed
                and f"optional({schema_type(item.type)})" not in allowed
            ):
                raise OnnxError(f"{where}: internal error: output {formal.name} is {item}, which the schema forbids")
        elif isinstance(item, Text) and "tensor(string)" not in schema.constraints.get(
            formal.type_str, {formal.type_str}
        ):
            raise OnnxError(f"{where}: internal error: output {formal.name} is {item}, which the schema forbids")
        out.append(item)
    return out


def type_text(item: Item) -> str | None:
    """The type of an item as schemas write it; None where it cannot be told (an empty sequence)."""
    if isinstance(item, Tensor | Text):
        return schema_type(item.type)
    if isinstance(item, Items) and item:
        inner = type_text(item[0])
        return None if inner is None else f"seq({inner})"
    return None


def type_proto(item: Item) -> Any:
    """The type of an item as a message, with its shape."""
    if isinstance(item, Tensor):
        return onnx.helper.make_tensor_type_proto(item.type, item.shape)
    if isinstance(item, Items) and item:
        return onnx.helper.make_sequence_type_proto(type_proto(item[0]))
    return onnx.TypeProto()


def describe(node: Any, index: int) -> str:
    """How a node is named in messages."""
    domain = plain_domain(node.domain)
    operator = f"{domain}.{node.op_type}" if domain else node.op_type
    if node.name:
        return f"{operator} node {node.name!r}"
    made = next((o for o in node.output if o), "")
    return f"{operator} node {index}" + (f" (which gives {made!r})" if made else "")


# ---- items -----------------------------------------------------------------------------------------------------------


def has_text(item: Item) -> bool:
    return any(has_text(part) for part in item) if isinstance(item, Items) else isinstance(item, Text)


def is_known(item: Item) -> bool:
    """Whether the value of an item is known at import."""
    if isinstance(item, Tensor):
        return item.constant is not None
    return all(is_known(part) for part in item) if isinstance(item, Items) else True


def origin_of(item: Any) -> frozenset[str]:
    """The inputs of the graph that an item depends on."""
    if isinstance(item, Tensor):
        return item.origin
    return frozenset(n for part in item for n in origin_of(part)) if isinstance(item, Items) else frozenset()


def moved(item: Item, program: Program) -> Item:
    """A known item for another program."""
    if isinstance(item, Tensor):
        return Tensor(program, item.type, constant=item.constant, origin=item.origin)
    return Items(moved(part, program) for part in item) if isinstance(item, Items) else None


def values_of(results: Any) -> Iterator[Value]:
    """The values among what a rule gave that are not known yet."""
    if isinstance(results, Value):
        yield results
    elif isinstance(results, Tensor):
        if results.constant is None:
            yield results.value
    elif isinstance(results, list | tuple):
        for part in results:
            yield from values_of(part)


def replaced(results: Any, known: dict[Value, torch.Tensor], program: Program) -> Any:
    """What a rule gave in a little program, as constants of another one."""
    if isinstance(results, Value):
        tensor = known[results]
        return Tensor(program, onnx_type(tensor.dtype), constant=tensor)
    if isinstance(results, Tensor):
        constant = known[results.value] if results.constant is None else results.constant
        return Tensor(program, results.type, constant=constant, origin=results.origin)
    if isinstance(results, Items):
        return Items(replaced(part, known, program) for part in results)
    if isinstance(results, list | tuple):
        return [replaced(part, known, program) for part in results]
    return results


def with_origin(program: Program, results: Any, origin: frozenset[str]) -> Any:
    """Values as tensors; each notes the inputs it depends on."""
    if isinstance(results, Value):
        dtype = torch_dtype(results.type.element)
        return Tensor(program, onnx_type(dtype), value=results, origin=origin)
    if isinstance(results, Tensor):
        if results.state is None and not results.origin:
            results.origin = origin
        return results
    if isinstance(results, Items):
        return Items(with_origin(program, part, origin) for part in results)
    if isinstance(results, list | tuple):
        return [with_origin(program, part, origin) for part in results]
    return results
