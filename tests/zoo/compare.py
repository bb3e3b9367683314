"""Trains a network compiled and eagerly side by side; `python -m tests.zoo.compare` does so for the whole zoo.

The command writes tests/zoo/results.json, from which docs/coverage.md takes its table of networks.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import pathlib
import sys
from dataclasses import asdict, dataclass

import torch
from torch import nn

import wholestep as ws
from wholestep.errors import WholestepError

from . import KNOWN_FAILURES, ZOO
from .entry import Entry

STEPS = 10
LOSS_TOLERANCE = 1e-5  # relative
PARAMETER_TOLERANCE = 1e-4
KINDS = ("adamw", "sgd")


@dataclass(frozen=True)
class Comparison:
    """How far ten compiled steps were from ten eager ones."""

    loss: float  # largest relative difference
    parameters: float  # largest difference, without those whose exact gradient is zero
    null_parameters: float  # largest difference among those
    opaque: tuple[str, ...]
    traced: tuple[str, ...]

    def agrees(self, lr: float) -> bool:
        """Within tolerance; a parameter whose exact gradient is zero may drift by Adam's step on rounding noise."""
        return (
            self.loss <= LOSS_TOLERANCE
            and self.parameters <= PARAMETER_TOLERANCE
            and self.null_parameters <= max(PARAMETER_TOLERANCE, 1.1 * STEPS * lr)
        )


def optimizer_for(kind: str, entry: Entry, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=entry.lr[0])
    return torch.optim.SGD(parameters, lr=entry.lr[1], momentum=0.9)


def moved(value: object, device: str) -> object:
    """A batch on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)({k: moved(v, device) for k, v in value.items()})
    return type(value)(moved(v, device) for v in value) if isinstance(value, list | tuple) else value  # type: ignore[call-arg]


def compare(entry: Entry, kind: str, device: str = "cpu") -> Comparison:
    """Ten compiled and ten eager steps from the same start."""
    model, batch = entry.build()
    model, batch = model.to(device), moved(batch, device)  # type: ignore[assignment]
    twin = copy.deepcopy(model)
    step = ws.compile(model, entry.loss_fn, optimizer_for(kind, entry, model), batch)
    eager = optimizer_for(kind, entry, twin)
    loss = 0.0
    for _ in range(STEPS):
        ours = step(**batch) if isinstance(batch, dict) else step(*batch)
        eager.zero_grad()
        theirs = entry.loss(twin, batch)
        theirs.backward()
        eager.step()
        wanted = float(theirs.detach())
        loss = max(loss, abs(float(ours) - wanted) / max(abs(wanted), 1e-12))
    ordinary = null = 0.0
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        difference = float((mine - other).detach().abs().max())
        if kind == "adamw" and any(fnmatch.fnmatch(name, pattern) for pattern in entry.null_gradients):
            null = max(null, difference)
        else:
            ordinary = max(ordinary, difference)
    # a bias before BatchNorm is one of those whose exact gradient is zero, and its drift shows in the running mean,
    # added up over some channels where a product lies between them
    drift = 5 * STEPS * entry.lr[0] if kind == "adamw" and entry.null_gradients else 1e-5
    if far := far_buffers(model, twin, drift):
        raise AssertionError(f"buffer {far[0]} differs")
    report = step.report()
    return Comparison(loss, ordinary, null, tuple(report.opaque), tuple(report.traced))


def far_buffers(model: nn.Module, twin: nn.Module, drift: float) -> list[str]:
    """Buffers that are further apart than rounding makes them."""
    pairs = zip(model.named_buffers(), twin.buffers(), strict=True)
    return [name for (name, a), b in pairs if not torch.allclose(a.double(), b.double(), rtol=1e-4, atol=drift)]


def main(names: list[str]) -> None:
    path = pathlib.Path(__file__).with_name("results.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    torch.set_num_threads(1)
    for name in names or [*ZOO, *KNOWN_FAILURES]:
        entry = ZOO.get(name) or KNOWN_FAILURES[name]
        row: dict[str, object] = {"family": entry.family}
        try:
            for index, kind in enumerate(KINDS):
                found = compare(entry, kind)
                row[kind] = {k: v for k, v in asdict(found).items() if k in ("loss", "parameters", "null_parameters")}
                row[kind]["agrees"] = found.agrees(entry.lr[index])  # type: ignore[index]
                row["opaque"], row["traced"] = found.opaque, found.traced
            row["status"] = "agrees" if all(row[k]["agrees"] for k in KINDS) else "differs"  # type: ignore[index]
        except WholestepError as error:
            row["status"], row["reason"] = (
                "refused",
                str(error).splitlines()[-1] if not entry.failure else entry.failure,
            )
        except AssertionError as error:
            row["status"], row["reason"] = "differs", str(error)
        results[name] = row
        print(name, row, flush=True)
        path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
