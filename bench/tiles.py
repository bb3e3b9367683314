"""Products with computed factors, by every tile that Triton could run them in: is what is tried first the best?

`python bench/tiles.py resnet50:12 fcn_resnet50:9 --out FILE.md` plans networks of bench/networks as bench/bytes.py
does, takes the heaviest regions that fusion asks for in which a product computes a factor, and times them on the GPU of
this machine in up to `--most` tiles each: also by programs that stay where these are not offered, because much is
multiplied. Without a GPU it lists regions and tiles. Operands are made up, as when kernels are chosen; results are
compared then, and not here. `--write FILE` keeps the regions as text, `--read FILE` takes them from there instead of
planning networks: to plan takes longer than to time, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.bytes import Guessed, planned  # noqa: E402
from bench.kernel_clock import publish  # noqa: E402
from wholestep.backends.contest import Built  # noqa: E402
from wholestep.backends.kernels import Spec  # noqa: E402
from wholestep.backends.made_up import neutral_inputs  # noqa: E402
from wholestep.backends.providers import Offer, Region, Triton  # noqa: E402
from wholestep.backends.timing import on_gpu  # noqa: E402
from wholestep.backends.trial import empty  # noqa: E402
from wholestep.backends.triton import contraction_tiles  # noqa: E402
from wholestep.bench.workload import Case, build  # noqa: E402
from wholestep.dialects import context  # noqa: E402
from wholestep.ir.parser import parse  # noqa: E402
from wholestep.ir.printer import print_op  # noqa: E402
from wholestep.transforms.loops import lowered  # noqa: E402
from wholestep.transforms.regions import base  # noqa: E402

GPU = torch.device("cuda")
#: tensors of fewer bytes are not named
LARGE = 1 << 22
#: bytes per second that no kernel exceeds by much
SPEED = 4.2e12


def regions_of(network: str, count: int) -> list[Region]:
    """The heaviest regions of a network in which a product computes a factor, of equal ones the first."""
    seen: dict[str, Region] = {}
    guessed = Guessed.times

    def times(self: Guessed, regions: Sequence[Region]) -> list[float]:
        seen.update((region.key, region) for region in regions)
        return guessed(self, regions)

    with patch.object(Guessed, "times", times):
        planned(build(Case(network, "full"), "cpu"))
    found: dict[object, Region] = {}
    for region in sorted(filter(computes_a_factor, seen.values()), key=lambda r: -r.bytes):
        found.setdefault((named(region), len(region.ops)), region)
    return list(found.values())[:count]


def computes_a_factor(region: Region) -> bool:
    given = set(region.body.regions[0].block.arguments)
    products = [op for op in region.ops if op.name == "step.contract"]
    computed = bool(products) and any(base(v) not in given for v in products[0].operands[:2])
    return computed and not Triton().claims(region)


def named(region: Region) -> str:
    """What is large of a region, and what it does."""
    sides = [", ".join("x".join(map(str, s.shape)) for s in side if s.bytes >= LARGE) or "little"
             for side in (region.operands, region.results)]  # fmt: skip
    ops = sorted({op.name.removeprefix("step.") for op in region.ops} - {"reshape", "transpose", "cast", "constant"})
    return f"{sides[0]} -> {sides[1]} ({', '.join(ops)})"


def as_text(network: str, region: Region) -> dict[str, object]:
    """A region as JSON can hold it."""
    operands, results = (
        [[s.shape, s.strides, str(s.dtype).removeprefix("torch.")] for s in specs]
        for specs in (region.operands, region.results)
    )
    return {"network": network, "body": print_op(region.body), "operands": operands, "results": results}


def from_text(kept: dict[str, Any], device: torch.device) -> Region:
    module = parse(f'"builtin.module"() ({{\n{kept["body"]}\n}}) : () -> ()\n', context())
    body = module.regions[0].block.first
    assert body is not None
    operands, results = (
        tuple(Spec(tuple(shape), tuple(strides), getattr(torch, dtype)) for shape, strides, dtype in kept[side])
        for side in ("operands", "results")
    )
    return Region(body, lowered(body), operands, results, device)


def offers_of(region: Region, most: int) -> list[Offer]:
    with (
        patch.object(contraction_tiles, "MOST", most),
        patch.object(contraction_tiles, "RIDGE_COMPUTED", contraction_tiles.RIDGE),
    ):
        return Triton().offers(region)


@torch.no_grad()
def timed(region: Region, offers: Sequence[Offer], built: Built) -> Iterator[tuple[float, str]]:
    """Microseconds of each tile; infinite where it does not fit."""
    inputs, outputs = neutral_inputs(region, False), [empty(s, GPU) for s in region.results]
    for number, offer in enumerate(offers):
        run, scratch = built[offer.key], [empty(s, GPU) for s in offer.scratch]
        name = f"{offer.name.removeprefix('dot ')} #{number}"
        if isinstance(run, Exception):
            yield float("inf"), f"{name} ({run})"
        else:
            yield 1e6 * on_gpu(lambda: run(*inputs, *outputs, *scratch), GPU), name  # noqa: B023


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK:COUNT", help="a name of bench/networks, regions of it")
    parser.add_argument("--write", type=pathlib.Path, help="keeps their regions, as text")
    parser.add_argument("--read", type=pathlib.Path, nargs="*", default=[], help="regions that were kept")
    parser.add_argument("--most", type=int, default=10, help="tiles of a region")
    parser.add_argument("--out", type=pathlib.Path, help="where the page is kept")
    args = parser.parse_args(arguments)
    here = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if here else "no GPU: nothing is timed"
    given = " ".join([*args.networks, *(f"--read {path.name}" for path in args.read)])
    command = f"python bench/tiles.py {given} --most {args.most}"
    about = f"`{command}`: {device}, torch {torch.__version__}; microseconds, and places in the list of what is tried."
    lines = ["# Products with computed factors, tile by tile", "", about, ""]
    found: list[tuple[str, Region]] = []
    for text in args.networks:
        name, _, count = text.partition(":")
        found += [(name, region) for region in regions_of(name, int(count or 5))]
    if args.write is not None:
        args.write.write_text(json.dumps([as_text(*each) for each in found]))
    for path in args.read:
        found += [(kept["network"], from_text(kept, GPU)) for kept in json.loads(path.read_text())]
    work = [(name, region, offers_of(region, args.most)) for name, region in found]
    built = Triton().build([offer for *_, offers in work for offer in offers]) if here else {}
    figures = []
    for name, region, offers in work:
        lines.append(f"- {name}, {region.bytes * 1e-6:.0f} MB ({region.bytes / SPEED * 1e6:.0f} us): {named(region)}")
        rows = sorted(timed(region, offers, built)) if here else [(0.0, o.name) for o in offers]
        lines.append("  " + "; ".join(f"{us:.0f} {tile}" if us else tile for us, tile in rows))
        figures.append({"network": name, "region": named(region), "bytes": region.bytes, "tiles": rows})
        if here:
            torch.cuda.empty_cache()
    publish("\n".join(lines), figures, args.out)


if __name__ == "__main__":
    main()
