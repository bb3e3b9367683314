"""Reads MLIR generic form: what our printer writes, and what `mlir-opt --mlir-print-op-generic` makes of it.

A recursive descent over tokens, with a shortcut for an op that stands on one line as the printer writes it. Values are
defined before they are used. Every failure is a ParseError with line, column and caret.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from ..errors import VerifyError
from .attribute_parser import AttributeParser
from .attributes import Attribute
from .builtin import Module, builtin, func, module
from .collector import collector_paused
from .core import UNKNOWN, Block, Location, Op, Region, Value
from .dialect import Context, OpDef
from .tokens import END, MAX_NESTING, NUMBER, PUNCTUATION, SIGIL, STRING, VALUE, WORD
from .types import Type
from .verify import InvalidOp
from .verify import verify as verify_program

# An op without regions as the printer writes it, on one line: a shortcut past its tokens. Its attributes, its types and
# its location repeat a lot, so each is read once per distinct text.
_LINE = re.compile(
    r"""(?:(%[A-Za-z0-9$._\-]+)[ ]=[ ])?                                          # 1 the only result
    ("[^"\\\n]+")                                                               # 2 name
    \(((?:%[A-Za-z0-9$._\-\#]+(?:,[ ]%[A-Za-z0-9$._\-\#]+)*)?)\)                # 3 operands
    (?:[ ](\{[^{}"/\n]*(?:"[^"\\\n]*"[^{}"/\n]*)*\}))?                          # 4 attributes
    [ ]:[ ](\([^()"/\n]*\)[ ]->[ ](?:tensor<[^<>()"/\n]*>|\([^()"/\n]*\)         # 5 types
      |![A-Za-z0-9_.]+(?![A-Za-z0-9_.$\-]|[ \t\r\n]*<)))                        #   also a dialect's, without parameters
    (?:[ ](loc\("[^"\\\n]*"(?:\("[^"\\\n]*":[0-9]+:[0-9]+\)|:[0-9]+:[0-9]+)?\)))?  # 6 location
    """,
    re.VERBOSE | re.ASCII,
)


def parse(text: str, context: Context, filename: str = "<text>", verify: bool = False) -> Op:
    """The module that a text describes. Ops outside a module are put into one, as MLIR does.

    With `verify`, the program is verified as well, and a VerifyError then shows the line of the text.
    """
    with collector_paused():
        parser = _Parser(text, context, filename)
        root = parser.module()
        if verify:
            parser.verify(root)
    return root


class _Parser(AttributeParser):
    def __init__(self, text: str, context: Context, filename: str):
        super().__init__(text, filename)
        self.context = context
        self.definitions: dict[str, type[OpDef]] = {}
        self.values: dict[str, Value] = {}  # by every way to write it: %x, %y#1
        self.groups: dict[str, tuple[Value, ...]] = {}  # names of several results
        self.dictionaries: dict[str, dict[str, Attribute]] = {}
        self.signatures: dict[str, tuple[list[Type], list[Type]]] = {}
        self.locations: dict[str, Location] = {}
        self.defined: list[str] = []
        self.argument_count = 0
        self.positions: dict[Op, int] = {}
        self.location_aliases: dict[str, Location | str] = {}
        self.unresolved: list[tuple[Op, Location | str, int]] = []

    # ---- ops ----

    def module(self) -> Op:
        ops: list[Op] = []
        while self.kind != END:
            if self.kind == SIGIL and self.token.startswith("#"):
                self.location_alias()
            else:
                ops.append(self.op(0))
        self.resolve_locations()
        if len(ops) == 1 and ops[0].definition is Module:
            return ops[0]
        root = module()
        for op in ops:
            root.regions[0].block.append(op)
        return root

    def op(self, depth: int) -> Op:
        line = _LINE.match(self.text, self.start)
        return self.tokens_of_op(depth) if line is None else self.line_of_op(line)

    def line_of_op(self, line: re.Match[str]) -> Op:
        """An op that stands on one line; does what `tokens_of_op` does."""
        name, quoted, uses, entries, types, place = line.groups()
        start = line.start()
        definition = self.definitions.get(quoted)
        if definition is None:
            self.seek(line.start(2))
            definition = self.find_definition()
        try:
            values = self.values
            operands = [values[use] for use in uses.split(", ")] if uses else []
        except KeyError:
            operands = self.uses_at(line.start(3), line.end(3))
        attributes: dict[str, Attribute] = {}
        if entries is not None:
            known = self.dictionaries.get(entries)
            if known is None:
                self.seek(line.start(4))
                known = {}
                self.dictionary(known, 0)
                self.dictionaries[entries] = known
            attributes = known.copy()
        signature = self.signatures.get(types)
        if signature is None:
            self.seek(line.start(5))
            inputs = self.type_list(0)
            self.expect("->", "after the operand types")
            signature = self.signatures[types] = (inputs, self.result_types(0))
        if signature[0] != [value.type for value in operands]:
            self.check_operands(definition, operands, signature[0], start, line.start(3))
        loc = UNKNOWN
        if place is not None:
            known_loc = self.locations.get(place)
            if known_loc is None:
                self.seek(line.start(6))
                known_loc = self.locations[place] = self.location()
            loc = known_loc
        self.end = line.end()
        self.advance()
        op = Op(definition, operands, signature[1], attributes, (), loc)
        self.positions[op] = start
        if place is None and self.token == "loc" and self.kind == WORD:
            self.location_of(op)
        if name is not None:
            results = op.results
            if len(results) == 1 and name not in values and name not in self.groups:
                values[name] = results[0]
                self.defined.append(name)
                if not name[1].isdigit():
                    results[0].name = name[1:]
                elif not name[1:].isdigit():
                    self.fail(f"{name} is not the name of a value: it starts with a digit", start)
            else:
                self.define_results(op, [(name, None, start)])
        return op

    def uses_at(self, start: int, end: int) -> list[Value]:
        """The operands written in a piece of the text, token by token."""
        self.seek(start)
        found = []
        while self.start < end:
            if self.kind == VALUE:
                found.append(self.use())
            elif self.token != ",":
                self.fail(f"expected a value, {self.seen()}")
            self.advance()
        return found

    def check_operands(
        self, definition: type[OpDef], operands: list[Value], types: list[Type], start: int, first: int
    ) -> None:
        """Fails where the types as written are not those of the operands; `first` is where the first one stands."""
        if len(types) != len(operands):
            self.fail(f"{definition.name} has {len(operands)} operands but {len(types)} operand types", start)
        for i, value in enumerate(operands):
            if value.type is not types[i]:
                self.seek(first)
                for _ in range(2 * i):  # past each earlier value and its comma
                    self.advance()
                self.fail(f"{self.token} is defined as {value.type} but used as {types[i]}")

    def tokens_of_op(self, depth: int) -> Op:
        names: list[tuple[str, int | None, int]] = []
        start = self.start
        if self.kind == VALUE:
            names = self.result_names()
        if self.kind != STRING:
            self.fail(f'expected an op such as "dialect.name"(...), {self.seen()}')
        definition = self.definitions.get(self.token) or self.find_definition()
        self.advance()
        self.expect("(", "before the operands")
        operands: list[Value] = []
        first = self.start
        while self.kind == VALUE:
            operands.append(self.use())
            self.advance()
            if self.token != ",":
                break
            self.advance()
            if self.kind != VALUE:
                self.fail(f"expected a value after ',', {self.seen()}")
        self.expect(")", "after the operands")
        attributes: dict[str, Attribute] = {}
        if self.token == "[" and self.kind == PUNCTUATION:
            self.fail("successor blocks are not supported: control flow is structured")
        if self.token == "<" and self.kind == PUNCTUATION:
            self.advance()
            self.dictionary(attributes, 0)
            self.expect(">", "after the properties")
        regions: list[Region] = []
        if self.token == "(" and self.kind == PUNCTUATION:
            regions = self.regions(definition, depth)
        if self.token == "{" and self.kind == PUNCTUATION:
            self.dictionary(attributes, 0)
        self.expect(":", "before the types of the op")
        if self.token != "(" or self.kind != PUNCTUATION:
            self.fail(f"expected the operand types in parentheses, {self.seen()}")
        inputs = self.type_list(0)
        self.expect("->", "after the operand types")
        outputs = self.result_types(0)
        if inputs != [value.type for value in operands]:
            self.check_operands(definition, operands, inputs, start, first)
        op = Op(definition, operands, outputs, attributes, regions)
        self.positions[op] = start
        if self.token == "loc" and self.kind == WORD:
            self.location_of(op)
        if names:
            self.define_results(op, names)
        return op

    def result_names(self) -> list[tuple[str, int | None, int]]:
        names: list[tuple[str, int | None, int]] = []
        while True:
            if self.kind != VALUE or "#" in self.token:
                self.fail(f"expected the name of a result, {self.seen()}")
            name, position, count = self.token, self.start, None
            self.advance()
            if self.accept(":"):
                if self.kind != NUMBER or not self.token.isdigit() or len(self.token) > 6 or int(self.token) < 1:
                    self.fail(f"expected the number of results, {self.seen()}")
                count = int(self.token)
                self.advance()
            names.append((name, count, position))
            if not self.accept(","):
                self.expect("=", "after the names of the results")
                return names

    def define_results(self, op: Op, names: list[tuple[str, int | None, int]]) -> None:
        results = op.results
        named = sum(count or 1 for _, count, _ in names)
        if named != len(results):
            self.fail(f"{op.name} has {len(results)} results but {named} are named", names[0][2])
        index = 0
        for name, count, position in names:
            group = results[index : index + (count or 1)]
            self.define(name, group, position)
            index += len(group)

    def define(self, name: str, group: tuple[Value, ...], position: int) -> None:
        """Gives a name of the text to one value or several."""
        if name in self.values or name in self.groups:
            self.fail(f"{name} is defined twice", position)
        if len(group) == 1:
            self.values[name] = group[0]
        else:
            self.groups[name] = group
            for i, value in enumerate(group):
                self.values[f"{name}#{i}"] = value
                self.defined.append(f"{name}#{i}")
        self.defined.append(name)
        if not name[1].isdigit():
            group[0].name = name[1:]

    def use(self) -> Value:
        """The value that the current token names."""
        token = self.token
        found = self.values.get(token)
        if found is not None:
            return found
        name, _, index = token.partition("#")
        if name in self.groups:
            count = len(self.groups[name])
            self.fail(f"{name} has {count} results; {token} is none of them; write {name}#0")
        if name in self.values:
            if index.strip("0"):
                self.fail(f"{name} has one result; {token} is none")
            return self.values[name]
        near = difflib.get_close_matches(name, [*self.values, *self.groups], 1)
        hint = f"; did you mean {near[0]}?" if near else "; a value must be defined before it is used"
        self.fail(f"{name} is not defined{hint}")

    def find_definition(self) -> type[OpDef]:
        name = self.string()
        found = self.context.find(name)
        if found is None:
            own = {"builtin": builtin, "func": func}.get(name.partition(".")[0])
            found = own.ops.get(name.partition(".")[2]) if own else None
        if found is None:
            dialects = [*self.context.dialects.values(), builtin, func]
            known = {definition.name: None for dialect in dialects for definition in dialect.ops.values()}
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known dialects: {', '.join(self.context.dialects)}"
            self.fail(f"unknown op {name!r}{hint}")
        self.definitions[self.token] = found
        return found

    # ---- regions ----

    def regions(self, definition: type[OpDef], depth: int) -> list[Region]:
        if depth >= MAX_NESTING:
            self.fail(f"regions are nested more than {MAX_NESTING} deep")
        self.advance()
        regions = []
        while True:
            regions.append(self.region(definition, depth))
            if not self.accept(","):
                break
        self.expect(")", "after the regions")
        return regions

    def region(self, definition: type[OpDef], depth: int) -> Region:
        saved = (self.values, self.groups, self.defined, self.argument_count)
        self.defined = []
        if definition.isolated:
            self.values, self.groups, self.argument_count = {}, {}, 0
        self.expect("{", "before a region")
        region = Region()
        block: Block | None = None
        while not (self.token == "}" and self.kind == PUNCTUATION):
            if self.kind == SIGIL and self.token.startswith("^"):
                if block is not None:
                    self.fail("a region has at most one block")
                block = self.block_header()
            elif block is None:
                block = Block()
            if self.kind == END:
                self.fail("the text ends inside a region; expected '}'")
            if block.parent is None:
                region.append(block)
            if not (self.token == "}" and self.kind == PUNCTUATION) and self.kind != SIGIL:
                block.append(self.op(depth + 1))
            elif self.kind == SIGIL and not self.token.startswith("^"):
                self.fail(f"expected an op, {self.seen()}")
        self.advance()
        if not definition.isolated:
            for name in self.defined:
                self.values.pop(name, None)
                self.groups.pop(name, None)
            saved = (*saved[:3], self.argument_count)
        self.values, self.groups, self.defined, self.argument_count = saved
        return region

    def block_header(self) -> Block:
        self.advance()
        block = Block()
        if self.accept("("):
            while self.token != ")":
                name, position = self.token, self.start
                if self.kind != VALUE or "#" in name:
                    self.fail(f"expected the name of a block argument, {self.seen()}")
                self.advance()
                self.expect(":", "before the type of the argument")
                value = block.add_argument(self.type(0))
                self.define(name, (value,), position)
                if name == f"%arg{self.argument_count}":
                    value.name = None
                self.argument_count += 1
                if self.token == "loc" and self.kind == WORD:
                    self.location()
                if not self.accept(","):
                    break
                if self.kind != VALUE:
                    self.fail(f"expected a block argument after ',', {self.seen()}")
            self.expect(")", "after the block arguments")
        self.expect(":", "after the block header")
        return block

    # ---- locations ----

    def location_of(self, op: Op) -> None:
        position = self.start
        loc = self.location()
        if isinstance(loc, Location):
            op.loc = loc
        else:
            self.unresolved.append((op, loc, position))

    def location(self) -> Any:
        """Reads `loc(...)`: a Location, or something that `resolve` makes one of when all aliases are known."""
        self.advance()
        self.expect("(", "after 'loc'")
        found = self.location_body(0)
        self.expect(")", "after the location")
        return found

    def location_body(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            self.fail(f"locations are nested more than {MAX_NESTING} deep")
        if self.kind == SIGIL and self.token.startswith("#"):
            alias = self.token
            self.advance()
            return alias
        if self.kind == WORD and self.token == "unknown":
            self.advance()
            return UNKNOWN
        if self.kind != STRING:
            self.fail(f"expected a location, {self.seen()}")
        text = self.string()
        self.advance()
        if self.accept(":"):
            line = self.line_number()
            if self.accept(":"):
                self.line_number()
            return Location("", text, line)
        if self.accept("("):
            inner = self.location_body(depth + 1)
            self.expect(")", "after the place of a named location")
            if isinstance(inner, Location):
                return Location(text, inner.file, inner.line)
            return (text, inner)
        return Location(text)

    def line_number(self) -> int:
        if self.kind != NUMBER or not self.token.isdigit():
            self.fail(f"expected a line or column number, {self.seen()}")
        value = self.integer("", self.token, self.start)
        self.advance()
        return value

    def location_alias(self) -> None:
        name = self.token
        self.advance()
        self.expect("=", "after an alias")
        if self.token != "loc" or self.kind != WORD:
            self.fail(f"only locations may have aliases, {self.seen()}")
        self.location_aliases[name] = self.location()

    def resolve_locations(self) -> None:
        for op, loc, position in self.unresolved:
            op.loc = self.resolve(loc, position, 0)

    def resolve(self, loc: Any, position: int, depth: int) -> Location:
        if isinstance(loc, Location):
            return loc
        if depth > MAX_NESTING:
            self.fail("this location refers to itself", position)
        if isinstance(loc, tuple):
            inner = self.resolve(loc[1], position, depth + 1)
            return Location(loc[0], inner.file, inner.line)
        if loc not in self.location_aliases:
            self.fail(f"the location {loc} is not defined", position)
        return self.resolve(self.location_aliases[loc], position, depth + 1)

    # ---- verification ----

    def verify(self, root: Op) -> None:
        try:
            verify_program(root)
        except InvalidOp as error:
            line, column, source = self.place(self.positions.get(error.op, 0))
            caret = " " * (column - 1) + "^"
            message = f"{self.filename}:{line}:{column}: error: {error.op.name}: {error.problem}\n{source}\n{caret}"
            raise VerifyError(message) from None
