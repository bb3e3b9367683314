"""Pattern rewriting: a pattern looks at one op and changes the program around it; the driver goes on until none fits.

Ops are visited in program order, then whatever a rewrite touched; the outcome does not depend on hashing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ..errors import IRError
from .collector import collector_paused
from .core import Block, Builder, Op, Value
from .dialect import OpDef


class RewritePattern:
    """One way to improve a program. `roots` names the declarations it looks at; empty means every op."""

    roots: ClassVar[tuple[type[OpDef], ...]] = ()

    def match_and_rewrite(self, op: Op, rewriter: PatternRewriter) -> None:
        """Looks at `op`; if it fits, changes the program through `rewriter` and only through it."""
        raise NotImplementedError


class PatternRewriter(Builder):
    """A builder in front of the matched op; new ops take its location and phase. It tells the driver what changed."""

    def __init__(self, op: Op, driver: _Driver):
        if op.parent is None:
            raise ValueError(f"{op.name} is in no block")
        super().__init__(op.parent, op, op.loc, op.phase)
        self.driver = driver
        self.changed = False

    def insert_before(self, op: Op) -> None:
        """New ops go before `op`."""
        assert op.parent is not None
        self.block, self.before = op.parent, op

    def insert_after(self, op: Op) -> None:
        """New ops go after `op`."""
        assert op.parent is not None
        self.block, self.before = op.parent, op.next

    def insert_at_start(self, block: Block) -> None:
        self.block, self.before = block, block.first

    def insert_at_end(self, block: Block) -> None:
        self.block, self.before = block, None

    def insert(self, op: Op) -> Op:
        self.changed = True
        self.driver.add(op)
        return super().insert(op)

    def touched(self, op: Op) -> None:
        """Says that `op` was changed in place: its attributes, for instance."""
        self.changed = True
        self.driver.add(op)
        for result in op.results:
            self.driver.add_users(result)

    def set_operands(self, op: Op, operands: Iterable[Value]) -> None:
        before = op.operands
        op.set_operands(operands)
        self.touched(op)
        self.driver.add_producers(before)

    def replace_value(self, old: Value, new: Value) -> None:
        """Every use of `old` becomes a use of `new`."""
        if old.type is not new.type:
            raise ValueError(f"cannot replace a value of type {old.type} by one of type {new.type}")
        self.changed = True
        self.driver.add_users(old)
        old.replace_by(new)
        if new.name is None:
            new.name = old.name

    def replace_op(self, op: Op, by: Op | Value | Sequence[Value]) -> None:
        """The results of `op` become those of another op, or these values, and `op` is erased."""
        values = by.results if isinstance(by, Op) else (by,) if isinstance(by, Value) else tuple(by)
        if len(values) != len(op.results):
            raise ValueError(f"{op.name} has {len(op.results)} results; {len(values)} were given to replace them")
        for old, new in zip(op.results, values, strict=True):
            self.replace_value(old, new)
        self.erase_op(op)

    def erase_op(self, op: Op) -> None:
        """Removes an op whose results are unused."""
        self.changed = True
        operands = [value for inner in op.walk() for value in inner.operands]
        for inner in op.walk():
            self.driver.forget(inner)
        if self.before is op:
            self.before = op.next
        op.erase()
        self.driver.add_producers(operands)

    def inline_block(self, block: Block, before: Op, arguments: Sequence[Value]) -> None:
        """Moves the ops of a block in front of `before`; the block's arguments become these values."""
        if len(arguments) != len(block.arguments):
            raise ValueError(f"the block has {len(block.arguments)} arguments; {len(arguments)} values were given")
        assert before.parent is not None
        for old, new in zip(block.arguments, arguments, strict=True):
            self.replace_value(old, new)
        for op in block:
            op.detach()
            before.parent.insert_before(op, before)
            self.driver.add(op)
        self.changed = True


class _Driver:
    """The worklist: each op is in it at most once."""

    def __init__(self) -> None:
        self.queue: deque[Op] = deque()
        self.queued: set[Op] = set()

    def add(self, op: Op) -> None:
        if op not in self.queued:
            self.queued.add(op)
            self.queue.append(op)

    def add_users(self, value: Value) -> None:
        for op in value.uses:
            self.add(op)

    def add_producers(self, values: Iterable[Value]) -> None:
        for value in values:
            if value.op is not None and value.op.parent is not None:
                self.add(value.op)

    def forget(self, op: Op) -> None:
        self.queued.discard(op)

    def next(self) -> Op | None:
        while self.queue:
            op = self.queue.popleft()
            if op in self.queued:
                self.queued.remove(op)
                return op
        return None


def apply_patterns(root: Op, patterns: Iterable[RewritePattern], limit: int | None = None) -> int:
    """Applies patterns to everything nested in `root` until none changes anything; returns the number of rewrites.

    Patterns are tried in the order given. After `limit` rewrites (a hundred per op by default) it is taken for certain
    that they undo each other, and an IRError says which.
    """
    with collector_paused():
        return _apply(root, list(patterns), limit)


def _apply(root: Op, patterns: list[RewritePattern], limit: int | None) -> int:
    driver = _Driver()
    for each in root.walk():
        if each is not root:
            driver.add(each)
    if limit is None:
        limit = 100 * len(driver.queue) + 1000
    by_definition: dict[type[OpDef], list[RewritePattern]] = {}
    recent: deque[str] = deque(maxlen=6)
    count = 0
    while (op := driver.next()) is not None:
        fitting = by_definition.get(op.definition)
        if fitting is None:
            fitting = [p for p in patterns if not p.roots or issubclass(op.definition, p.roots)]
            by_definition[op.definition] = fitting
        for pattern in fitting:
            rewriter = PatternRewriter(op, driver)
            name = op.name
            pattern.match_and_rewrite(op, rewriter)
            if not rewriter.changed:
                continue
            count += 1
            recent.append(f"{type(pattern).__name__} on {name} ({op.loc})")
            if count > limit:
                raise IRError(
                    f"the patterns did not settle after {limit} rewrites; two of them probably undo each other.\n"
                    "The last rewrites:\n  " + "\n  ".join(recent)
                )
            if op.parent is None:
                break
            driver.add(op)
    return count
