"""Cuts tiles into pieces and puts these together again, while every number stays with the thread that has it.

Tensor cores leave each thread some columns of some rows. Where a whole tile of that order meets one as it was read from
memory, Triton goes on in the first, and of pieces in the second: every piece would go through shared memory and back.
So tiles that were read are packed into one integer with the sums, whole, and unpacked in pieces: machine code has
nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.core import Value
from .scalars import Number
from .text import Text

#: bits that an integer has beside a sum
BESIDE = 32
#: bits and the unsigned integer of types that can be packed
WHOLE = {
    "tl.bfloat16": (16, "tl.uint16"),
    "tl.float16": (16, "tl.uint16"),
    "tl.float32": (32, "tl.uint32"),
    "tl.int1": (1, ""),
}


@dataclass(frozen=True)
class Packed:
    """A tile that was read, from some bit of the integer on."""

    value: Value
    type: str
    first: int

    def into(self, name: str) -> str:
        bits = f"{name}.to({WHOLE[self.type][1]}, bitcast=True)" if self.type != "tl.int1" else name
        wide = f"{bits}.to(tl.uint64)"
        return f"({wide} << {self.first})" if self.first else wide

    def out_of(self, name: str) -> Number:
        low = f"({name} >> {self.first})" if self.first else name
        if self.type == "tl.int1":
            return Number(f"({low} & 1) != 0", "tl.int1")
        own = Number(f"{low}.to({WHOLE[self.type][1]}).to({self.type}, bitcast=True)", self.type)
        return Number(own.to("tl.float32"), "tl.float32")


def grouped(types: Mapping[Value, str]) -> list[list[Packed]]:
    """Which tiles go into one integer, by their types."""
    found: list[list[Packed]] = []
    first = BESIDE
    for value, type in types.items():
        bits = WHOLE[type][0]
        if first + bits > BESIDE:
            found.append([])
            first = 0
        found[-1].append(Packed(value, type, first))
        first += bits
    return found


def with_sums(total: str, names: Sequence[str]) -> str:
    """An integer of a sum and of what is packed beside it."""
    return " | ".join([f"({total}.to(tl.uint32, bitcast=True).to(tl.uint64) << {BESIDE})", *names])


def sums_in(name: str) -> str:
    return f"({name} >> {BESIDE}).to(tl.uint32).to(tl.float32, bitcast=True)"


def cut(text: Text, name: str, count: int, high: int, wide: int) -> list[str]:
    """The names of equal pieces of a tile's columns."""
    names = [name]
    while len(names) < count:
        wide //= 2
        for each in names:
            text.line(f"{each} = tl.permute(tl.reshape({each}, ({high}, 2, {wide})), (0, 2, 1))")
            text.line(f"{each}_0, {each}_1 = tl.split({each})")
        names = [f"{each}_{half}" for each in names for half in (0, 1)]
    return names


def side_by_side(text: Text, names: Sequence[str], high: int, wide: int) -> str:
    """The name of a tile that has the columns of one piece after those of another."""
    while len(names) > 1:
        wide *= 2
        pairs = list(zip(names[::2], names[1::2], strict=True))
        names = [f"{one}_on" for one, _ in pairs]
        for name, (one, other) in zip(names, pairs, strict=True):
            joined = f"tl.permute(tl.join({one}, {other}), (0, 2, 1))"
            text.line(f"{name} = tl.reshape({joined}, ({high}, {wide}))")
    return names[0]
