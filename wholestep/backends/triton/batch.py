"""Many pointwise kernels with one body as one launch: the update of all parameters of an optimizer.

Each program looks up in tables which kernel it works for and from which point on. Kernels qualify whose tensors all
are walked as one flat run; a full block is read without masks, so that it is read in wide words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...dialects.loop import NoSchedule
from ...errors import InputError
from ...ir.core import Op
from ..kernels import Spec
from .families import Family, Function, unsupported
from .generate import UNALIGNED, Batched, Candidate, digest
from .scalars import POINTERS, NoText, helper_text
from .text import Axis, Text, axis
from .walk import Dim

BLOCK, WARPS = 1024, 4
ELEMENTS = {
    "*fp64": "float64",
    "*fp32": "float32",
    "*bf16": "bfloat16",
    "*fp16": "float16",
    "*i64": "int64",
    "*i32": "int32",
    "*i16": "int16",
    "*i8": "int8",
    "*u8": "uint8",
    "*i1": "int1",
}


class Flat(Text):
    """A body that says the same for every kernel: its only index is x."""

    def index(self, dim: Dim) -> str:
        return "x"


def body(family: Family, masked: bool) -> Flat:
    x: Axis = axis("x", family.inside, BLOCK, 0)
    text = Flat(family.walk, (x,), "batch", depth=2)
    text.open, text.starts = (x,), {"x": "first"}
    if masked:
        text.masks["x"] = "in_x"
    text.ready(text.needed(family.stores))
    return text


def flat(function: Op, specs: Sequence[Spec]) -> Family:
    """The kernel, if it is one flat run; NoText says why it is not."""
    reason = unsupported(specs, function)
    if reason:
        raise NoText(reason)
    family = Family(function, specs)
    if family.kind != "pointwise" or len(family.inside) != 1:
        raise NoText("only pointwise kernels whose tensors are walked as one run are batched")
    if family.walk.wide:
        raise NoText("it has more than 2**31 points")
    return family


def pointers_of(family: Family) -> list[str]:
    return [POINTERS[str(a.type.element)] for a in family.walk.block.arguments]


def key(function: Op, specs: Sequence[Spec]) -> str:
    """Kernels with the same key can be batched; "" where a kernel cannot be."""
    try:
        family = flat(function, specs)
        content = [*pointers_of(family), *body(family, True).lines]
    except (NoText, NoSchedule):
        return ""
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]


def batch(kernels: Sequence[tuple[Op, Sequence[Spec]]]) -> Candidate:
    """One candidate for all of them; InputError where they cannot be one launch."""
    keys = {key(function, specs) for function, specs in kernels}
    if len(keys) != 1 or "" in keys:
        raise InputError(
            "kernels of one launch must be pointwise, flat and of the same body. Try: group them by batch_key"
        )
    families = [flat(function, specs) for function, specs in kernels]
    first = families[0]
    pointers = pointers_of(first)
    full, rest = body(first, False), body(first, True)
    source = helper_text(sorted(full.helpers)) + "\n\n".join(
        written(name, pointers, full, rest, hint) for name, hint in (("batch", 16), (UNALIGNED, 1))
    )
    batched = Batched(tuple(f.length for f in families), len(pointers), BLOCK)
    functions = (Function("batch", (0, 1), batched.blocks, WARPS),)
    types = ("*i64", "*i32")
    name = f"batch of {len(families)} {BLOCK} w{WARPS}"
    sizes = [batched.sizes, batched.tensors]
    return Candidate(name, (), digest(source, functions, types, sizes), source, functions, types, batched)


def written(name: str, pointers: Sequence[str], full: Text, rest: Text, hint: int) -> str:
    """The function for tensors that start at multiples of `hint` bytes."""
    lines = [
        "@triton.jit",
        f"def {name}(table, blocks):",
        "    pid = tl.program_id(0)",
        f"    row = table + tl.load(blocks + 2 * pid) * {len(pointers) + 1}",
        f"    first = tl.multiple_of(tl.load(blocks + 2 * pid + 1), {BLOCK})",
        f"    size = tl.load(row + {len(pointers)})",
    ]
    for i, pointer in enumerate(pointers):
        lines.append(f"    p{i} = tl.load(row + {i}).to(tl.pointer_type(tl.{ELEMENTS[pointer]}))")
        lines += [f"    p{i} = tl.multiple_of(p{i}, {hint})"] if hint > 1 else []
    lines += [
        f"    x = first + tl.arange(0, {BLOCK})",
        f"    if first + {BLOCK} <= size:",
        *full.lines,
        "    else:",
        "        in_x = x < size",
        *rest.lines,
    ]
    return "\n".join(lines) + "\n"
