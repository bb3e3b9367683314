"""The verifier: is this graph well formed, and does every op keep the rules of its declaration?

One pass in program order. What depends only on an op's declaration, types and attributes is checked once per distinct
combination, so that a hundred equal layers cost little more than one.
"""

from __future__ import annotations

from typing import Any

from ..errors import VerifyError
from .attributes import Attribute, I32Array, attribute_text, freeze
from .collector import collector_paused
from .core import UNKNOWN, Block, Op, Value
from .dialect import OpDef, UnregisteredOp
from .printer import print_op
from .tokens import MAX_NESTING

_FREE_ATTRIBUTES = frozenset({"phase", "again", "operandSegmentSizes"})
_PLAIN = frozenset({str, int, float, bool, type(None)})


class InvalidOp(VerifyError):
    """A VerifyError that knows the op it is about."""

    def __init__(self, op: Op, problem: str):
        self.op, self.problem = op, problem
        where = f"{op.name} ({op.loc})" if op.loc is not UNKNOWN else op.name
        super().__init__(f"{where}: {problem}\n  {_excerpt(op)}")


def verify(root: Op) -> None:
    """Raises a VerifyError for the first problem in an op and everything nested in it."""
    with collector_paused():
        _Verifier().run(root)


class _Verifier:
    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.plain: dict[tuple[type, ...], bool] = {}  # attribute kinds -> whether they hash as they are
        self.inside = 0  # pairs of an op and a value it uses, met in what is verified
        self.listed = 0  # such pairs that the values list

    def run(self, root: Op) -> None:
        outside = _visible_from(root)
        self.check_declared(root)
        for value in root.operands:
            if value.uses.get(root) != root.operands.count(value):
                raise InvalidOp(root, _wrong_use(root, value))
        self.regions(root, set(outside), 0)
        self.check_own_rule(root)
        if self.inside != self.listed and not outside:
            _find_stale_use(root)

    def regions(self, op: Op, visible: set[Value], depth: int) -> None:
        if depth > MAX_NESTING:
            raise InvalidOp(op, f"regions are nested more than {MAX_NESTING} deep")
        for region in op.regions:
            if region.parent is not op:
                raise InvalidOp(op, "one of its regions names another op as its parent")
            if len(region.blocks) > 1:
                raise InvalidOp(op, f"a region has {len(region.blocks)} blocks, expected at most one")
            for block in region.blocks:
                if block.parent is not region:
                    raise InvalidOp(op, "the block of its region names another region as its parent")
                if op.definition.isolated:
                    self.block(op, block, set(), depth)
                else:
                    self.block(op, block, visible, depth)

    def block(self, owner: Op, block: Block, visible: set[Value], depth: int) -> None:
        made: list[Value] = []
        for index, value in enumerate(block.arguments):
            if value.owner is not block or value.index != index:
                raise InvalidOp(owner, f"block argument {index} does not know its place")
            made.append(value)
        visible.update(made)
        symbols: set[str] = set()
        before: Op | None = None
        seen = self.seen
        inside = 0
        plain = self.plain
        default_check = OpDef.check
        op = block.first
        while op is not None:
            if op.parent is not block or op.prev is not before:
                raise InvalidOp(op, "it is not linked into its block properly")
            definition = op.definition
            operands = op.operands
            repeated = False
            for value in operands:
                if value not in visible:
                    raise InvalidOp(op, _not_visible(op, value))
                count = value.uses.get(op)
                if count != 1:
                    repeated = True
                    if count != operands.count(value):
                        raise InvalidOp(op, _wrong_use(op, value))
            inside += len(set(operands)) if repeated else len(operands)
            results = op.results
            for value in results:
                if value.owner is not op:
                    raise InvalidOp(op, "a result names another op as its owner")
            made += results
            attributes = op.attributes
            kinds = tuple(map(type, attributes.values()))
            is_plain = plain.get(kinds)
            if is_plain is None:
                is_plain = plain[kinds] = all(kind in _PLAIN for kind in kinds)
            key = (
                definition,
                tuple([v.type for v in operands]),
                results[0].type if len(results) == 1 else tuple([v.type for v in results]),
                kinds,
                tuple(attributes.items()) if is_plain else _frozen(op),
                len(op.regions),
            )
            try:
                if key not in seen:
                    self.check_declared(op)
                    seen.add(key)
            except TypeError:  # an attribute that does not hash is none
                self.check_declared(op)
            if op.regions:
                self.regions(op, visible, depth + 1)
            visible.update(results)
            if definition.check is not default_check:
                self.check_own_rule(op)
            if definition.terminator and op.next is not None:
                raise InvalidOp(op, f"it ends its block, yet {op.next.name} follows")
            if "sym_name" in attributes:
                name = str(attributes["sym_name"])
                if name in symbols:
                    raise InvalidOp(op, f"the symbol @{name} is defined twice")
                symbols.add(name)
            before = op
            op = op.next
        if block.last is not before:
            raise InvalidOp(owner, "the end of its block is not its last op")
        self.inside += inside
        self.listed += sum([len(value.uses) for value in made])
        visible.difference_update(made)

    def check_own_rule(self, op: Op) -> None:
        try:
            problem = op.definition.check(op)
        except Exception as error:
            raise InvalidOp(op, f"its check failed: {type(error).__name__}: {error}") from error
        if problem:
            raise InvalidOp(op, problem)

    def check_declared(self, op: Op) -> None:
        """Everything that follows from the declaration, the types and the attributes alone."""
        problem = declared_problem(op)
        if problem:
            raise InvalidOp(op, problem)


def _frozen(op: Op) -> Any:
    """A hashable stand-in for attributes that are not plain; tells (1,) from (True,)."""
    return tuple(
        [
            (key, value, tuple(map(type, value))) if type(value) is tuple else (key, freeze(value))
            for key, value in op.attributes.items()
        ]
    )


def declared_problem(op: Op) -> str | None:
    """What an op breaks of its declaration; None where it keeps it."""
    definition = op.definition
    if issubclass(definition, UnregisteredOp):
        return None
    for check in (_operand_problem, _attribute_problem, _result_problem, _region_problem, _infer_problem):
        problem = check(op)
        if problem:
            return problem
    return None


def _operand_problem(op: Op) -> str | None:
    fields = op.definition.operand_fields
    given = len(op.operands)
    needed = sum(f.single for f in fields)
    loose = [f for f in fields if not f.single]
    if len(loose) > 1:
        problem = _segment_problem(op)
        if problem:
            return problem
    elif given < needed or (not loose and given > needed) or (loose and not loose[0].variadic and given > needed + 1):
        most = "" if not loose else " or more" if loose[0].variadic else f" or {needed + 1}"
        names = ", ".join(f.name for f in fields) or "none"
        return f"has {given} operands, expected {needed}{most} ({names})"
    for f, group in zip(fields, op.definition.segments(op.operands, op.attributes), strict=True):
        for value in group if f.variadic else [] if group is None else [group]:
            if not f.type.accepts(value.type):
                return f"operand {f.name!r} is {value.type}, expected {_expected(f.type)}"
    return None


def _expected(constraint: Any) -> str:
    return constraint.name if constraint.rank is None else f"{constraint.name} of rank {constraint.rank}"


def _segment_problem(op: Op) -> str | None:
    fields = op.definition.operand_fields
    sizes = op.attributes.get("operandSegmentSizes")
    if not isinstance(sizes, I32Array):
        return f"needs operandSegmentSizes = array<i32: ...> with {len(fields)} sizes to tell its operands apart"
    if len(sizes.values) != len(fields) or sum(sizes.values) != len(op.operands) or min(sizes.values) < 0:
        names = ", ".join(f.name for f in fields)
        return f"operandSegmentSizes {list(sizes.values)} does not split {len(op.operands)} operands into ({names})"
    for f, size in zip(fields, sizes.values, strict=True):
        if (f.single and size != 1) or (f.optional and size > 1):
            return f"operandSegmentSizes gives operand {f.name!r} {size} values"
    return None


def _attribute_problem(op: Op) -> str | None:
    declared = op.definition.attribute_fields
    for name, attr in declared.items():
        if name not in op.attributes:
            if attr.optional:
                continue
            return f"needs its attribute {name!r} ({attr.describe()})"
        value = op.attributes[name]
        if not attr.accepts(value):
            return f"attribute {name!r} is {_attribute_text(value)}, expected {attr.describe()}"
    for name, value in op.attributes.items():
        if name not in declared and name not in _FREE_ATTRIBUTES and "." not in name:
            known = ", ".join(declared) or "none"
            return f"has no attribute {name!r} (it has: {known}); a foreign attribute needs a dot in its name"
        if name == "phase" and type(value) is not str:
            return f"attribute 'phase' is {_attribute_text(value)}, expected a string"
        problem = _value_problem(value, 0)
        if problem:
            return f"attribute {name!r} {problem}"
    if "operandSegmentSizes" in op.attributes and op.definition._loose < 2:
        return "has operandSegmentSizes, but its operands split without them"
    return None


def _value_problem(value: Attribute, depth: int) -> str | None:
    """What keeps a value from being an attribute that prints and parses back."""
    if depth > MAX_NESTING:
        return f"is nested more than {MAX_NESTING} deep"
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "does not fit in 64 bits"
    if type(value) is tuple and not all(type(v) is int and -(1 << 63) <= v < 1 << 63 for v in value):
        return "is a tuple of something other than 64-bit integers"
    if type(value) is list or type(value) is dict:
        for inner in value.values() if type(value) is dict else value:
            problem = _value_problem(inner, depth + 1)
            if problem:
                return problem
        return None
    try:
        attribute_text(value)
    except TypeError:
        return f"is a Python {type(value).__name__}, which is not an attribute"
    return None


def _attribute_text(value: Attribute) -> str:
    try:
        return attribute_text(value)
    except TypeError:
        return f"a Python {type(value).__name__}"


def _result_problem(op: Op) -> str | None:
    fields = op.definition.result_fields
    needed = sum(not f.variadic for f in fields)
    variadic = needed != len(fields)
    given = len(op.results)
    if given < needed or (given > needed and not variadic):
        return f"has {given} results, expected {needed}{' or more' if variadic else ''}"
    position = 0
    for f in fields:
        size = given - needed if f.variadic else 1
        for value in op.results[position : position + size]:
            if not f.type.accepts(value.type):
                return f"result {f.name!r} is {value.type}, expected {_expected(f.type)}"
        position += size
    return None


def _region_problem(op: Op) -> str | None:
    given, needed = len(op.regions), op.definition.region_count
    return None if given == needed else f"has {given} regions, expected {needed}"


def _infer_problem(op: Op) -> str | None:
    definition = op.definition
    if definition.infer is None:
        return None
    try:
        expected = definition.infer_types([v.type for v in op.operands], op.attributes)
    except Exception as error:
        return f"its operands do not fit together: {error if str(error) else type(error).__name__}"
    given = [v.type for v in op.results]
    if given != expected:
        return f"has result types ({_types(given)}), expected ({_types(expected)})"
    return None


def _types(types: list[Any]) -> str:
    return ", ".join(map(str, types))


def _visible_from(root: Op) -> set[Value]:
    """What an op that sits inside a larger program may use in its regions."""
    visible: set[Value] = set()
    op = root
    while op.parent is not None and not op.definition.isolated:
        visible.update(op.parent.arguments)
        earlier = op.prev
        while earlier is not None:
            visible.update(earlier.results)
            earlier = earlier.prev
        if op.parent.parent is None or op.parent.parent.parent is None:
            break
        op = op.parent.parent.parent
    return visible


def _not_visible(op: Op, value: Value) -> str:
    position = next(i for i, v in enumerate(op.operands) if v is value)
    owner = value.owner
    if isinstance(owner, Block):
        return f"operand {position} is an argument of a block that does not enclose this op"
    if owner.parent is None:
        return f"operand {position} comes from a {owner.name} that is in no block (erased?)"
    if owner.parent is op.parent:
        return f"operand {position} comes from a {owner.name} further down; a value must be made before it is used"
    return f"operand {position} comes from a {owner.name} in a block that does not enclose this op"


def _wrong_use(op: Op, value: Value) -> str:
    return f"uses {value!r} {op.operands.count(value)} times, but the value lists {value.uses.get(op, 0)} uses by it"


def _find_stale_use(root: Op) -> None:
    for op in root.walk():
        values = [*op.results] if op is not root else []
        for region in op.regions:
            for block in region.blocks:
                values += block.arguments
        for value in values:
            for user, count in value.uses.items():
                if user.operands.count(value) != count:
                    raise InvalidOp(op, f"{value!r} lists {count} uses by {user.name}, which does not use it so often")
                if user.parent is None:
                    raise InvalidOp(op, f"{value!r} is used by a {user.name} that is in no block")
    raise InvalidOp(root, "a value made in it is used outside it")


def _excerpt(op: Op) -> str:
    """One line of text that shows the op; its regions are left out."""
    try:
        text = print_op(Op(op.definition, (), (), op.attributes)) if op.regions else print_op(op)
    except Exception:  # the graph is broken: whatever stops the printer must not hide the problem
        return repr(op)
    return text if len(text) < 500 else text[:500] + " ..."
