"""Attention with the loops around it: which regions are of this family, and their candidates.

The sides of such a region (`transforms/attention_sides.py`) are written into a function per walk: forward walks keys
for a block of queries; gradients walk keys for a block of queries, and queries for a block of keys
(`attention_text.py`). Where one program has all keys of a head, all gradients are one walk over queries: no score is
computed twice, and the gradient of queries is whole at once, which libraries add up in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...dialects.loop import Load
from ...ir.core import Op
from ...transforms.attention_sides import ATTENTION, NoSides, Sides, sides_of
from ...transforms.loops import NotLoops
from ..kernels import Spec
from .contraction_tiles import SHARED
from .families import Generated, power_of_two, unsupported_among
from .scalars import POINTERS, NoText

if TYPE_CHECKING:
    from .generate import Candidate

#: element types that are multiplied in tiles, in bytes
BYTES = {"bf16": 2, "f16": 2, "f32": 4}
#: the widest rows of which a tile fits into registers
WIDEST = 256
#: the smallest side of a tile
SHORTEST = 16
#: rows of a program, rows that it walks at a time, warps, walks under way
FORWARD = [
    (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 4), (64, 32, 4, 3), (32, 32, 4, 2),
]  # fmt: skip
BACKWARD = [
    (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2), (64, 32, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2),
    (32, 32, 8, 1),
]  # fmt: skip
#: all gradients at once: queries that are walked at a time, warps, walks under way
AT_ONCE = [(32, 8, 2), (32, 8, 1), (64, 16, 1), (32, 16, 2), (32, 4, 2), (16, 4, 1)]
#: the most keys of which a program has all
ALL_KEYS = 256
#: registers of a multiprocessor
REGISTERS = 1 << 16
#: the same where numbers are f32, which no tensor core multiplies exactly
EXACT = [(64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)]
#: ways that are tried at most, and numbers of a thread that sums and scores may take; at once, of its registers
MOST, HELD, MOST_HELD = 5, 128, 0.78


@dataclass(frozen=True)
class Tile:
    """A configuration: rows that a program has, rows that it walks at a time, warps, and walks under way.

    at_once: the rows are all keys of a head, and all gradients are computed in one walk.
    """

    rows: int
    step: int
    warps: int
    stages: int
    at_once: bool = False

    def __str__(self) -> str:
        return f"attention{' at once' * self.at_once} {self.rows}x{self.step} s{self.stages} w{self.warps}"


def is_attention(body: Op) -> bool:
    return any(op.name in ATTENTION for op in body.regions[0].block)


def why_not(body: Op, specs: Sequence[Spec]) -> str:
    """ "" if the body is an attention that this family writes, else a reason for a user."""
    try:
        attention = Attention(body, specs)
        if attention.sides.is_bare and not attention.tiles()[0].at_once:
            return "nothing is computed around the attention, which a library runs"
        attention.generate(attention.tiles()[0])
    except (NoText, NoSides, NotLoops) as error:
        return str(error)
    return ""


def candidates(body: Op, specs: Sequence[Spec], only: str = "") -> list[Candidate]:
    """The best guess first, then alternatives worth timing. only: nothing but the one of that name is written."""
    attention = Attention(body, specs)
    return [candidate(attention, tile) for tile in attention.tiles() if only in ("", str(tile))]


def candidate(attention: Attention, tile: Tile) -> Candidate:
    """One configuration of a region."""
    from .generate import Candidate, digest

    made = attention.generate(tile)
    pointers = (*attention.pointers, *("*fp32" for _ in made.scratch))
    key = digest(made.source, made.functions, pointers)
    return Candidate(str(tile), made.scratch, key, made.source, made.functions, pointers)


class Attention:
    """A region around an attention: its sides, and how its tensors lie."""

    def __init__(self, body: Op, specs: Sequence[Spec]):
        block = body.regions[0].block
        assert block.last is not None
        self.values = [*block.arguments, *block.last.operands]
        self.specs = tuple(specs)
        self.sides: Sides = sides_of(body)
        self.anchor = anchor = self.sides.anchor
        if reason := unsupported_among(specs, self.values):
            raise NoText(reason)
        self.element = anchor.q.type.element
        if str(self.element) not in BYTES:
            raise NoText(f"an attention of {self.element} is not generated")
        if self.width > WIDEST or self.depth > WIDEST:
            raise NoText(f"rows of {max(anchor.q.type.shape[-1], anchor.v.type.shape[-1])} are too wide for a tile")

    @property
    def width(self) -> int:
        """Columns of a tile of queries and keys."""
        return max(SHORTEST, power_of_two(self.anchor.q.type.shape[-1]))

    @property
    def depth(self) -> int:
        """Columns of a tile of values and results."""
        return max(SHORTEST, power_of_two(self.anchor.v.type.shape[-1]))

    @property
    def group(self) -> int:
        """How many heads of queries share one of keys."""
        q, k = self.anchor.q.type.shape, self.anchor.k.type.shape
        return q[-3] // k[-3] if self.anchor.enable_gqa else 1

    @property
    def pointers(self) -> list[str]:
        return [POINTERS[str(v.type.element)] for v in self.values]

    @property
    def is_forward(self) -> bool:
        return "dout" not in self.sides.before

    def tiles(self) -> list[Tile]:
        """The configurations worth timing, no larger than the matrices; of gradients those at once first."""
        table = EXACT if BYTES[str(self.element)] == 4 else FORWARD if self.is_forward else BACKWARD
        most = max(SHORTEST, power_of_two(max(self.anchor.q.type.shape[-2], self.anchor.k.type.shape[-2])))
        tiles = dict.fromkeys(Tile(min(r, most), min(s, most), w, n) for r, s, w, n in table)
        found = [t for t in tiles if self.shared(t) <= SHARED and self.held(t) <= HELD * 32 * t.warps]
        found = self.at_once() + found
        if not found:
            raise NoText("no tile fits into shared memory and registers")
        return found[:MOST]

    def at_once(self) -> list[Tile]:
        """Configurations in which a program has all keys of a head."""
        keys = max(SHORTEST, power_of_two(self.anchor.k.type.shape[-2]))
        if self.is_forward or keys > ALL_KEYS or BYTES[str(self.element)] == 4:
            return []
        few = max(4, keys // 16)  # (a warp has 16 rows at least)
        tiles = [Tile(keys, min(step, keys), warps, stages, True) for step, warps, stages in AT_ONCE if warps <= few]
        registers = {t: MOST_HELD * min(255 * 32 * t.warps, REGISTERS) for t in tiles}
        return [t for t in registers if self.shared(t) <= SHARED and self.held(t) <= registers[t]]

    def shared(self, tile: Tile) -> int:
        """Bytes of shared memory: what is under way of what is walked, and tiles that are multiplied."""
        walked = [(self.loaded("k"), self.width), (self.loaded("v"), self.depth)]
        if not self.is_forward:
            walked = [max(w, (self.loaded(n), w[1])) for w, n in zip(walked, ("q", "dout"), strict=True)]
        ahead = (tile.stages - 1) * tile.step * sum(loaded * wide for loaded, wide in walked)
        columns = self.width + self.depth
        tiles = tile.rows * (self.width if self.is_forward else columns + tile.step) + tile.step * columns
        return ahead + tiles * BYTES[str(self.element)]

    def loaded(self, name: str) -> int:
        """Bytes that are loaded per element of an operand."""
        side = self.sides.before[name]
        found = 0
        for op in side.kernel.regions[0].block:
            if op.definition is Load:
                along = {d for row in op.attributes["map"] for d, c in enumerate(row[:-1]) if c}
                wide = along.intersection(side.rows) and along.intersection(side.columns)
                found += op.operands[0].type.element.bits // 8 if wide else 0
        return found

    def held(self, tile: Tile) -> int:
        """Numbers that a program has in registers: what it sums up, and a block of scores with its gradient."""
        if self.is_forward:
            return tile.rows * (self.depth + tile.step)
        return tile.rows * (self.width + self.depth + 2 * tile.step)

    def generate(self, tile: Tile) -> Generated:
        """The source for one configuration."""
        from .attention_text import generate

        return generate(self, tile)
