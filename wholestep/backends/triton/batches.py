"""What of a batch is one launch: pointwise kernels with one body (`batch.py`), and sums of everything, here.

A sum of everything, such as that of the squares of a gradient, is one launch that writes a partial sum per block of
every tensor, and one that adds the partial sums of each tensor up and computes what comes after them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...dialects.loop import NoSchedule
from ...ir.core import Op
from ..kernels import Spec
from . import batch as pointwise
from .batch import ELEMENTS, Flat, body, flat, pointers_of, written
from .families import Family, Function
from .generate import UNALIGNED, Batched, Candidate, digest, why_not
from .scalars import NoText, accumulator_type, combined, helper_text, neutral
from .text import Text, axis

#: points that one program sums up, partial sums that are added at a time, and warps
BLOCK, PARTIALS, WARPS = 4096, 1024, 8
ACCUMULATORS = {"tl.float32": "*fp32", "tl.float64": "*fp64", "tl.int64": "*i64", "tl.int32": "*i32"}


def key(function: Op, specs: Sequence[Spec]) -> str:
    """Kernels with the same key are one launch; "" where a kernel is none with any other."""
    found = pointwise.key(function, specs)
    if found:
        return found
    try:
        family = total(function, specs)
    except (NoText, NoSchedule):
        return ""
    content = ["total", *pointers(family), *partial(family, True).lines, *finish(family).lines]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]


def ways(
    kernels: dict[str, tuple[Op, Sequence[Spec]]], order: Sequence[str]
) -> tuple[list[Candidate], list[tuple[Spec, ...]]]:
    """What runs kernels of one key, given by name and in which order, and the scratch memory of each of them."""
    first = next(iter(kernels.values()))
    if pointwise.key(*first):
        return [elementwise({name: flat(*kernel) for name, kernel in kernels.items()}, order)], [() for _ in order]
    return sums({name: total(*kernel) for name, kernel in kernels.items()}, order)


def elementwise(by_name: dict[str, Family], order: Sequence[str]) -> Candidate:
    """One launch that computes every point of every kernel."""
    families = [by_name[name] for name in order]
    first, types = families[0], pointers_of(families[0])
    full, rest = body(first, False), body(first, True)
    sources = [written(name, types, full, rest, hint) for name, hint in (("batch", 16), (UNALIGNED, 1))]
    batched = Batched(tuple(f.length for f in families), len(types), pointwise.BLOCK)
    return candidate("points", helper_text(sorted(full.helpers)) + "\n\n".join(sources), batched, pointwise.WARPS)


def sums(by_name: dict[str, Family], order: Sequence[str]) -> tuple[list[Candidate], list[tuple[Spec, ...]]]:
    """Two launches, and the partial sums between them."""
    families = [by_name[name] for name in order]
    first, types = families[0], pointers(families[0])
    scratch: list[tuple[Spec, ...]] = [(first.scratch(first.across[0], -(-f.count // BLOCK), 0),) for f in families]
    full, rest, last = partial(first, False), partial(first, True), finish(first)
    some = [f"    if first + {BLOCK} <= size:", *full.lines, "    else:", "        in_x = x < size", *rest.lines]
    some = [f"    first = tl.multiple_of(first, {BLOCK})", f"    x = first + tl.arange(0, {BLOCK})", *some]
    sizes, counts = tuple(f.count for f in families), tuple(mine[0].shape[0] for mine in scratch)
    return [
        candidate("sums", source(types, full, some), Batched(sizes, len(types), BLOCK), WARPS),
        candidate("totals", source(types, last, last.lines), Batched(counts, len(types), max(counts)), 4),
    ], scratch


def total(function: Op, specs: Sequence[Spec]) -> Family:
    """The kernel, if it is one sum over all of its points, which lie as one run; NoText says why it is not."""
    reason = why_not(function, specs)
    if reason:
        raise NoText(reason)
    family = Family(function, specs)
    if family.kind != "sums" or family.inside or len(family.outside) != 1:
        raise NoText("only sums of everything, walked as one run, are batched")
    if len(family.across) != 1 or family.before or family.walk.wide:
        raise NoText("more than one sum, or more than 2**31 points")
    return family


def pointers(family: Family) -> list[str]:
    """Triton's types of a kernel's tensors, and of its partial sums."""
    return [*pointers_of(family), ACCUMULATORS[accumulator_type(family.across[0].attributes["dtype"])]]


def partial(family: Family, masked: bool) -> Text:
    """The sum of one block."""
    (op,) = family.across
    x = axis("x", family.outside, BLOCK, 0)
    text = Flat(family.walk, (x,), "batch", depth=2)
    text.open, text.starts = (x,), {"x": "first"}
    if masked:
        text.masks["x"] = "in_x"
    text.ready(text.needed([op]))
    number = text.total(op, text.operand(op, [x]), [x], [x])
    text.line(f"tl.store(p{len(family.walk.specs)} + first // {BLOCK}, {number.text})")
    return text


def finish(family: Family) -> Text:
    """Adds the partial sums of one tensor up."""
    (op,) = family.across
    kind, type = op.attributes["kind"], accumulator_type(op.attributes["dtype"])
    q = axis("q", [], PARTIALS, 0)
    text = Text(family.walk, (q,), "batch")
    sums = text.accumulator(op, [q])
    with text.loop(f"q0 in range(0, size, {PARTIALS})"):
        text.line(f"q = q0 + tl.arange(0, {PARTIALS})")
        text.line(f"part = tl.load(p{len(family.walk.specs)} + q, mask=q < size, other={neutral(kind, type)})")
        text.line(f"{sums} = {combined(kind, sums, 'part', type)}")
    text.known(op, text.total(op, sums, [q], [q]))
    text.ready(text.needed(family.after))
    return text


def source(types: Sequence[str], text: Text, lines: Sequence[str]) -> str:
    """A kernel over a table: each program reads there which tensors it works on, and from which point on."""
    sources = []
    for name, hint in (("batch", 16), (UNALIGNED, 1)):
        head = [
            "@triton.jit",
            f"def {name}(table, blocks):",
            "    pid = tl.program_id(0)",
            f"    row = table + tl.load(blocks + 2 * pid) * {len(types) + 1}",
            "    first = tl.load(blocks + 2 * pid + 1)",
            f"    size = tl.load(row + {len(types)})",
        ]
        for i, pointer in enumerate(types):
            head.append(f"    p{i} = tl.load(row + {i}).to(tl.pointer_type(tl.{ELEMENTS[pointer]}))")
            head += [f"    p{i} = tl.multiple_of(p{i}, {hint})"] if hint > 1 else []
        sources.append("\n".join([*head, *lines]) + "\n")
    return helper_text(sorted(text.helpers)) + "\n\n".join(sources)


def candidate(what: str, text: str, batched: Batched, warps: int) -> Candidate:
    functions = (Function("batch", (0, 1), batched.blocks, warps),)
    types, name = ("*i64", "*i32"), f"{what} of {len(batched.sizes)} w{warps}"
    more = [batched.sizes, batched.tensors, batched.block]
    return Candidate(name, (), digest(text, functions, types, more), text, functions, types, batched)
