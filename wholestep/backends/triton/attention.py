"""Attention with the loops around it: which regions are of this family, and their candidates.

The sides of such a region (`transforms/attention_sides.py`) are written into one kernel per walk: forward walks keys for
a block of queries; gradients walk keys for a block of queries and queries for a block of keys (`attention_text.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.core import Op
from ...transforms.attention_sides import ATTENTION, NoSides, Sides, sides_of
from ...transforms.loops import NotLoops
from ..kernels import Spec
from .contraction_tiles import SHARED
from .families import Generated, power_of_two, unsupported_among
from .scalars import POINTERS, NoText

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
BACKWARD = [(64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (64, 128, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2)]
#: the same where numbers are f32, which no tensor core multiplies exactly
EXACT = [(64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)]
#: ways that are tried at most
MOST = 5


@dataclass(frozen=True)
class Tile:
    """A configuration: rows that a program has, rows that it walks at a time, warps, and walks under way."""

    rows: int
    step: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"attention {self.rows}x{self.step} s{self.stages} w{self.warps}"


def is_attention(body: Op) -> bool:
    return any(op.name in ATTENTION for op in body.regions[0].block)


def why_not(body: Op, specs: Sequence[Spec]) -> str:
    """ "" if the body is an attention that this family writes, else a reason for a user."""
    try:
        attention = Attention(body, specs)
        attention.generate(attention.tiles()[0])
    except (NoText, NoSides, NotLoops) as error:
        return str(error)
    return ""


def candidates(body: Op, specs: Sequence[Spec], only: str = "") -> list:
    """The best guess first, then alternatives worth timing. only: nothing but the one of that name is written."""
    from .generate import Candidate, digest

    attention, found = Attention(body, specs), []
    for tile in attention.tiles():
        if only in ("", str(tile)):
            made = attention.generate(tile)
            pointers = (*attention.pointers, *("*fp32" for _ in made.scratch))
            key = digest(made.source, made.functions, pointers)
            found.append(Candidate(str(tile), made.scratch, key, made.source, made.functions, pointers))
    return found


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
        return "out" in self.sides.after or "logsumexp" in self.sides.after

    def tiles(self) -> list[Tile]:
        """The configurations worth timing, no larger than the matrices and no larger than a multiprocessor."""
        bytes = BYTES[str(self.element)]
        table = EXACT if bytes == 4 else FORWARD if self.is_forward else BACKWARD
        longest = max(self.anchor.q.type.shape[-2], self.anchor.k.type.shape[-2])
        most = max(SHORTEST, power_of_two(longest))
        found: dict[Tile, None] = {}
        for rows, step, warps, stages in table:
            tile = Tile(min(rows, most), min(step, most), warps, stages)
            columns = self.width + self.depth
            shared = (tile.rows + tile.step * tile.stages) * columns * bytes
            # numbers of a thread: what is summed up, and a block of scores with its gradient
            held = tile.rows * columns // (1 if not self.is_forward else 2) + tile.rows * tile.step * 2
            if shared <= SHARED and held <= 192 * 32 * tile.warps * (2 if bytes == 4 else 1):
                found[tile] = None
        return list(found)[:MOST] or [Tile(min(16, most), min(16, most), 4, 1)]

    def generate(self, tile: Tile) -> Generated:
        """The source for one configuration."""
        from .attention_text import generate

        return generate(self, tile)
