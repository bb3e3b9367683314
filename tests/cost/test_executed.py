"""The ledger against what runs: every operator of a step is watched, and the bytes of its tensors are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.cost.models import TOKENS, convolution_step, language_model, language_step, moved, next_token
from wholestep.backends.kernels import NEW
from wholestep.plan.planner import Planned
from wholestep.torch_private import TorchDispatchMode, schema_of

IMAGES = (torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8) / 100, torch.arange(2))


def made(make: Callable[..., ws.TrainStep], **options: Any) -> ws.TrainStep:
    """A step of its own: the shared ones are never run."""
    return make.__wrapped__(**options)  # type: ignore[attr-defined,no-any-return]


STEPS: dict[str, Callable[[], tuple[ws.TrainStep, Any]]] = {
    "language model": lambda: (made(language_step), (TOKENS,)),
    "dropout, clipping, average": lambda: (made(language_step, dropout=0.1, clip_norm=1.0, ema=0.9), (TOKENS,)),
    "bf16": lambda: (made(language_step, precision="bf16"), (TOKENS,)),
    "accumulated": lambda: (made(language_step, dropout=0.1, accumulate=2), (TOKENS,)),
    "fp16, accumulated": lambda: (made(language_step, precision="fp16", accumulate=4), (TOKENS,)),
    "convolutions": lambda: (made(convolution_step), IMAGES),
    "convolutions, accumulated": lambda: (made(convolution_step, accumulate=2), IMAGES),
}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def distinct_bytes(tensors: list[torch.Tensor]) -> dict[Any, int]:
    """Bytes of each distinct tensor, a matrix and its transpose being one; of a broadcast one those it shows."""
    out = {}
    for t in tensors:
        places = {0}
        for n, s in zip(t.shape, t.stride(), strict=True):
            places = {p + i * s for p in places for i in range(n)} if s else places
        out[t.data_ptr(), t.element_size(), frozenset(places)] = len(places) * t.element_size() if t.numel() else 0
    return out


def put(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


class Watch(TorchDispatchMode):
    """Counts bytes per launch. An operator that changes a tensor is run twice to see whether it reads it."""

    def __init__(self, free: set[int]):
        super().__init__()
        self.free = free  # addresses of numbers of the host
        self.launch: int | None = None
        self.bytes: dict[int, list[int]] = {}
        self.calls = 0

    def enter(self, name: str) -> None:
        self.launch = int(name.removeprefix("ws:"))

    def leave(self) -> None:
        self.launch = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.launch is None or self.launch < 0:  # not the program's own
            return func(*args, **kwargs)
        schema = schema_of(func)
        reads: list[torch.Tensor] = []
        outs: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for position, argument in enumerate(schema.arguments):
            given = list(tensors_in(args[position] if position < len(args) else kwargs.get(argument.name)))
            if argument.alias_info is None or not argument.alias_info.is_write:
                reads += given
            else:
                (outs if argument.kwarg_only else changed).extend(given)
        before = [t.clone() for t in changed]
        result = func(*args, **kwargs)
        if not outs and not changed and all(r.alias_info is not None for r in schema.returns):
            return result  # a view
        after = [t.clone() for t in changed]
        for tensor, right in zip(changed, after, strict=True):
            put(changed, before)
            tensor.fill_(7)
            func(*args, **kwargs)
            if not torch.equal(tensor, right):
                reads.append(tensor)
        put(changed, after)
        written = [*outs, *changed] if outs or changed else list(tensors_in(result))
        looked_up = []
        if schema.name == "aten::index_select":  # only the rows that are asked for
            looked_up = [min(sum(distinct_bytes([reads.pop(0)]).values()), sum(distinct_bytes(written).values()))]
        reads = [t for t in reads if t.data_ptr() not in self.free]
        found = self.bytes.setdefault(self.launch, [0, 0])
        found[0] += sum(distinct_bytes(reads).values()) + sum(looked_up)
        found[1] += sum(distinct_bytes(written).values())
        self.calls += 1
        return result


def untraced(planned: Planned) -> dict[int, list[str]]:
    """Launches with calls that run as a whole, by position, and the names of those."""
    out: dict[int, list[str]] = {}
    for position, (launch, kernel) in enumerate(zip(planned.plan.launches, planned.kernels, strict=True)):
        if launch.body >= 0:
            names = [name for found in untraced(planned.bodies[launch.body]).values() for name in found]
        else:
            steps = [] if kernel is None else kernel.steps
            whole = any(s.kind == NEW and not hasattr(s.call, "overloadpacket") for s in steps)
            names = [launch.name] if whole else []
        if names:
            out[position] = names
    return out


@pytest.mark.parametrize("name", STEPS)
def test_every_launch_moves_what_the_ledger_says(name):
    check(*STEPS[name]())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"accumulate": 2, "clip_norm": 1.0}])
def test_every_launch_moves_what_the_ledger_says_on_a_gpu(options):
    model, tokens = language_model(dropout=0.1).cuda(), TOKENS.cuda()
    step = ws.compile(model, next_token, torch.optim.AdamW(model.parameters()), (tokens,), **options)
    check(step, (tokens,))


def check(step: ws.TrainStep, batch: Any) -> None:
    """Runs one step under watch and compares it with its ledger, launch by launch."""
    step(*batch)
    static = step._compiled.static
    assert static is not None and static.bound is not None
    watch = Watch({t.data_ptr() for t in static.bound.cells.tensors.values()})
    static.ranges = (watch.enter, watch.leave)
    with watch:
        step(*batch)
    ledger, plan = moved(step).ledger, static.plan
    counted: dict[int, list[int]] = {}
    for kernel in ledger.kernels:
        for move in kernel.moves:
            counted.setdefault(kernel.launch, [0, 0])[move.written] += kernel.times * move.bytes
    found = untraced(static.planned)  # they run operators that nobody knows before
    assert {name for names in found.values() for name in names} == set(plan.assumed)
    assert all(sum(watch.bytes[i]) >= sum(counted[i]) for i in found)
    wrong = [
        (plan.launches[i].name, watch.bytes.get(i), counted.get(i))
        for i in {*watch.bytes, *counted} - set(found)
        if watch.bytes.get(i) != counted.get(i)
    ]
    assert not wrong
    assert len(counted) > 30
    if not found:
        assert watch.calls == ledger.launches
        assert [sum(pair) for pair in zip(*watch.bytes.values(), strict=True)] == [ledger.read, ledger.written]
