"""What goes wrong on a GPU, on purpose: each case must end as it should, and the run says how.

`python bench/cuda_failures.py [--out FILE.md]` where there is a GPU, in a minute or two; bench/results/cuda_failures.md
holds the record. Each case is a process of its own, with an empty cache; `--device cpu` runs those that need none.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from wholestep.backends.providers import Offer, Provider, Region, register_provider  # noqa: E402
from wholestep.errors import WholestepError  # noqa: E402

MB = 1 << 20


def model(device: str, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width)).to(device)


def squares(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).pow(2).mean()


def compiled(net: nn.Module, x: torch.Tensor, **options: Any) -> ws.TrainStep:
    return ws.compile(net, squares, torch.optim.AdamW(net.parameters(), lr=0.01), (x,), **options)


def batch(device: str, rows: int = 512, width: int = 256) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(device)


def like_eager(step: ws.TrainStep, device: str) -> str:
    """Trains a few steps beside eager PyTorch."""
    eager, x = model(device), batch(device)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for _ in range(5):
        loss = squares(eager, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), loss.detach(), rtol=1e-4, atol=1e-6)
    return "five losses are eager's"


def of_tanh(name: str, launch: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Registers a provider that runs tanh by a function of (x, y)."""

    class Theirs(Provider):
        def takes(self, op: Any) -> bool:
            return op.name == "step.tanh"

        def claims(self, region: Region) -> str:
            return "" if [op.name for op in region.ops] == ["step.tanh"] else "it is no tanh"

        def offers(self, region: Region) -> list[Offer]:
            return [Offer("one", f"{name} {region.key}")]

        def build(self, offers: Any, report: Any = None) -> dict[str, Any]:
            return {offer.key: launch for offer in offers}

    Theirs.name = name
    register_provider(Theirs)


def told(caught: Iterable[Any], word: str) -> str:
    """The one warning that has a word in it."""
    (text,) = {str(w.message) for w in caught if word in str(w.message)}
    return text


# ---- the cases -------------------------------------------------------------------------------------------------------


def does_not_fit(device: str) -> list[str]:
    """A plan that needs more memory than the device has is refused before anything runs."""
    width = 4096
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12))).to(device)
    before = [p.detach().clone() for p in net.parameters()]
    free = torch.cuda.get_device_properties(0).total_memory
    x = torch.empty(free // (10 * width * 4), width, device=device)
    try:
        compiled(net, x)
    except WholestepError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        return [f"{type(error).__name__}: {error}", "the parameters are as they were"]
    raise AssertionError("it was not refused")


def corrupted_file(device: str) -> list[str]:
    """A saved step with a byte changed, or cut short, is refused."""
    step, said = compiled(model(device), batch(device)), []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.step")
        step.save(path)
        whole = path.read_bytes()
        middle = len(whole) // 2
        for broken in (whole[:middle], whole[:middle] + bytes([whole[middle] ^ 8]) + whole[middle + 1 :]):
            path.write_bytes(broken)
            net = model(device)
            try:
                ws.load(path, net, squares, torch.optim.AdamW(net.parameters(), lr=0.01))
            except WholestepError as error:
                said.append(f"{type(error).__name__}: {str(error).replace(folder, '')}")
        path.write_bytes(whole)
        net = model(device)
        loaded = ws.load(path, net, squares, torch.optim.AdamW(net.parameters(), lr=0.01))
        said.append(f"the file as it was: {like_eager(loaded, device)}")
    assert len(said) == 3, said
    return said


def not_capturable(device: str) -> list[str]:
    """A launch that waits for the device cannot be part of a CUDA graph. Where it is timed it is left out for
    that; else the step runs launch by launch, with one warning."""

    def waits(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.tanh(x, out=y)
        float(y[0, 0])

    of_tanh("waiting", waits)
    timed = compiled(model(device), batch(device), providers=["aten", "waiting"])
    said = [*excluded(timed, "waiting"), like_eager(timed, device), f"report: {timed.report().execution['by']}"]
    step = compiled(model(device), batch(device), providers=["waiting"], tune=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = like_eager(step, device)
    found = step.report().execution
    assert found["by"] == "from the plan, launch by launch", found
    said += [f"warning: {told(caught, 'launch by launch')}", trained]
    return [*said, f"report: {found['by']}; {found['why']}"]


def allocates(device: str) -> list[str]:
    """A launch that makes memory nobody planned is named, in a warning and in the report."""

    def makes(x: torch.Tensor, y: torch.Tensor) -> None:
        wide = torch.ones(16 * MB, device=x.device)
        torch.tanh(x, out=y)
        y.mul_(wide[0])

    of_tanh("greedy", makes)
    step = compiled(model(device), batch(device), providers=["greedy"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = like_eager(step, device)
    found = step.report().execution
    assert list(found["unplanned"].values()) and max(found["unplanned"].values()) >= 60 * MB, found["unplanned"]
    return [f"warning: {told(caught, 'greedy')}", trained, f"report: unplanned {found['unplanned']}; {found['by']}"]


def wrong_result(device: str) -> list[str]:
    """A way whose result is not ATen's is excluded before it is timed."""

    def wrong(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.tanh(x, out=y)
        y[3].add_(0.5)

    of_tanh("careless", wrong)
    step = compiled(model(device), batch(device), providers=["aten", "careless"])
    return [*excluded(step, "careless"), like_eager(step, device)]


def excluded(step: ws.TrainStep, name: str) -> list[str]:
    """What the report says of a provider's ways that were left out."""
    found = json.loads(step.report(format="json"))["kernels"]["excluded"]
    lines = [f"excluded: {each['way']}: {each['why']}" for each in found if each["way"].startswith(name)]
    assert lines, found
    return lines


def breaks_the_device(device: str) -> list[str]:
    """A kernel that reads where it must not: the process ends with an error that names it, and the next does without.
    There are two regions that it is tried for, so the third process trains."""

    def breaks(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x.flatten()[torch.full((1,), 1 << 40, device=x.device)])

    of_tanh("astray", breaks)
    try:
        step = compiled(model(device), batch(device), providers=["aten", "astray"])
    except WholestepError as error:
        return [f"{type(error).__name__}: {error}"]
    return [*excluded(step, "astray"), like_eager(step, device)]


def tunes(device: str) -> list[str]:
    """One of two processes that begin with the same empty store."""
    step = compiled(model(device), batch(device))
    return [like_eager(step, device), f"seconds: { ({k: round(v, 2) for k, v in step.report().seconds.items()}) }"]


#: each case and how many processes of it run, together or one after the other
CASES: dict[str, tuple[Callable[[str], list[str]], int, bool]] = {
    "does not fit": (does_not_fit, 1, False),
    "a corrupted file": (corrupted_file, 1, False),
    "cannot be captured": (not_capturable, 1, False),
    "allocates inside a launch": (allocates, 1, False),
    "a wrong result": (wrong_result, 1, False),
    "breaks the device": (breaks_the_device, 3, False),
    "two processes tune at once": (tunes, 2, True),
}
#: what a CPU shows too
ANYWHERE = ("a corrupted file", "allocates inside a launch", "a wrong result", "two processes tune at once")


def outcome(name: str, device: str, cache: str) -> tuple[bool, list[str]]:
    """All processes of a case: whether they ended as they should, and what they said."""
    _, count, together = CASES[name]
    command = [sys.executable, __file__, "--case", name, "--device", device]

    def start() -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=os.environ | {"WHOLESTEP_CACHE": cache}, cwd=ROOT, **pipes)

    running = [start() for _ in range(count)] if together else []
    good, said = True, []
    for number in range(count):
        process = running[number] if together else start()
        out, err = process.communicate(timeout=200)
        lines = out.splitlines() if process.returncode == 0 else [f"FAILED: {err.strip()[-1500:]}"]
        good &= process.returncode == 0
        said += [f"({number + 1}) {line}" if count > 1 else line for line in lines]
    return good, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print("\n".join(CASES[options.case][0](options.device)))
        return 0
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    lines = ["# What goes wrong on a GPU, on purpose", ""]
    lines += [
        f"`python bench/cuda_failures.py` on {machine}, torch {torch.__version__}, Python {platform.python_version()}."
    ]
    fine = True
    for name in options.only or (CASES if options.device == "cuda" else ANYWHERE):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as cache:
            good, said = outcome(name, options.device, cache)
        fine &= good
        told = [f"## {name}", "", (CASES[name][0].__doc__ or "").strip(), "", "```", *said, "```"]
        lines += ["", *told]
        print("\n".join(told), f"\n{time.perf_counter() - start:.0f} s", flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
