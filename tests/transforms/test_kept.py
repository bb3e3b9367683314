"""What backward reads of forward, decided by a minimum cut: no bit changes, fewer bytes are kept, chains stay short."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.plan.networks import Case, convnet, gpt
from tests.plan.simulate import simulate
from tests.runtime.runs import adamw
from wholestep.dialects.step.sources import Random
from wholestep.errors import InputError
from wholestep.ir.core import Op, Value
from wholestep.ir.passes import run_pipeline
from wholestep.ir.verify import verify
from wholestep.plan import Plan, plan_function
from wholestep.runtime.executor import Executable
from wholestep.transforms.kept import (
    Limits,
    Values,
    choose,
    cut,
    joined,
    kept_bytes,
    kept_values,
    minimum,
    needed,
    take,
)
from wholestep.transforms.opportunity import apply_key, sites
from wholestep.transforms.recompute import is_late, late_results, originals

#: sizes in tests are small, so that every byte counts
ALL = Limits(least=0)


def language(kind: str) -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    if kind == "gpt2":  # gelu_new written out, dropout everywhere
        config = transformers.GPT2Config(
            **{**sizes, "n_positions": 16}, use_cache=False, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=64))
    else:
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, use_cache=False, pad_token_id=0)
        model = transformers.LlamaForCausalLM(config)
    return model.train(), lambda m, ids: m(input_ids=ids, labels=ids).loss, (torch.randint(0, 61, (2, 12)),)


class Bottleneck(nn.Module):
    """As in ResNet-50."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(width, inner, 1), nn.Conv2d(inner, inner, 3, padding=1), nn.Conv2d(inner, width, 1)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(c) for c in (inner, inner, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = torch.relu(y) if number < 2 else y
        return torch.relu(x + y)


class Inverted(nn.Module):
    """As in EfficientNet: a depthwise convolution between two pointwise ones, channels scaled by squeeze and excite."""

    def __init__(self, width: int):
        super().__init__()
        inner = 4 * width
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(width, inner, 1, bias=False),
                nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False),
                nn.Conv2d(inner, width, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(c) for c in (inner, inner, width)])
        self.squeeze, self.excite = nn.Conv2d(inner, 2, 1), nn.Conv2d(2, inner, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.norms[0](self.convs[0](x)))
        y = nn.functional.silu(self.norms[1](self.convs[1](y)))
        y = y * torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.drop(self.norms[2](self.convs[2](y)))


def images(*blocks: nn.Module) -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip
    return model.train(), nn.functional.cross_entropy, (torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))


#: networks, with the most that may be left of what is kept
NETWORKS: dict[str, tuple[Callable[[], Any], float]] = {
    "gpt2": (lambda: language("gpt2"), 0.45),
    "bert": (lambda: language("bert"), 0.65),
    "llama": (lambda: language("llama"), 0.6),
    "resnet": (lambda: images(*[Bottleneck(16, 4) for _ in range(2)]), 0.7),
    "efficientnet": (lambda: images(Inverted(16)), 0.45),
}


def seeded(name: str) -> Any:
    torch.manual_seed(0)
    return NETWORKS[name][0]()


def train(name: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], ws.TrainStep]:
    model, loss_fn, batch = seeded(name)
    torch.manual_seed(5)
    step = ws.compile(model, loss_fn, adamw(model), batch, **options)
    return [float(step(*batch)) for _ in range(2)], model.state_dict(), step


def held(plan: Plan) -> int:
    """Bytes of the plan's own memory that are written in forward and read later."""
    phases = [launch.phase for launch in plan.launches]
    turn = next(n for n, phase in enumerate(phases) if phase not in ("forward", "loss", ""))
    return sum(b.bytes for b in plan.buffers if b.space == "arena" and 0 <= b.first < turn <= b.last)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt2", "bf16"), ("bert", "fp32"), ("llama", "bf16"), ("resnet", "bf16"), ("efficientnet", "fp32")],
)
def test_training_is_the_same_to_the_last_bit(name: str, precision: str) -> None:
    losses, state, plain = train(name, precision=precision)
    before = kept_bytes(plain.program())
    keys = choose(plain.program(), limits=ALL)
    others, other, leaner = train(name, precision=precision, recipe=keys)
    assert leaner.recipe == keys
    assert losses == others
    assert all(torch.equal(state[k], other[k]) for k in state)
    assert kept_bytes(leaner.program()) <= NETWORKS[name][1] * before


CASES: dict[str, Callable[[], Case]] = {
    "gpt-dropout": lambda: Case(gpt(0.1)),
    "gpt-bf16-accumulate": lambda: Case(gpt(0.1, layers=1), precision="bf16", accumulate=2, clip_norm=1.0),
    "conv-bf16": lambda: Case(convnet(), precision="bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_keeps_less_and_updates_may_come_early(name: str) -> None:
    """Replayed on poisoned memory, with state updated as soon as it can be: copies read what is not updated yet."""
    case = CASES[name]()
    function, inputs = case.program.function, case.inputs
    reference = Executable(function, "cpu", case.numbers)([x.clone() for x in inputs])
    before, _ = plan_function(function, "cpu", case.numbers, whole_updates=False)
    kept = kept_bytes(case.program.module)
    assert cut(case.program.module, limits=ALL)
    run_pipeline(case.program.module, "cse,dce")
    verify(case.program.module)
    assert kept_bytes(case.program.module) < kept
    plan, planned = plan_function(function, "cpu", case.numbers, whole_updates=False)
    replay = simulate(plan, planned, case.program.module, [x.clone() for x in inputs])
    for expected, got in zip(reference, replay.results, strict=True):
        assert torch.equal(expected.to(got.dtype), got)  # an output may be planned in the type it is computed in
    if not plan.bodies:
        assert held(plan) < held(before)


def block_of(case: Case) -> Any:
    return case.program.function.regions[0].block


def price(values: Values, kept: set[Value]) -> float:
    """What keeping some values costs, by the definition; infinite where others cannot be computed from them."""
    wanted = [v for v in values.read if not values.is_there(v)]
    sources: dict[Value, Any] = {}
    pending = list(wanted)
    while pending:
        value = pending.pop()
        if value not in sources:
            sources[value] = values.sources(value)
            pending += sources[value] or ()
    order = [r for op in values.early for r in reversed(op.results) if r in sources]
    surplus = dict(zip(order, joined(order, sources, set(values.read)), strict=True))
    again = needed(wanted, kept, sources)
    if any(sources[v] is None for v in again):
        return float("inf")
    return sum(map(values.cost, kept)) + sum(values.cost_again(v, surplus[v]) for v in again)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x * 2)
        return x + self.down(torch.tanh(self.gate(y)).exp() * self.up(y)).sin()


@pytest.mark.parametrize("joins", [0.0, 0.6, 1.5])
def test_no_other_choice_is_cheaper(joins: float) -> None:
    case = Case((Gated(), lambda m, x: m(x).pow(2).mean(), (torch.randn(3, 4),)))
    values = Values(block_of(case), Limits(least=0, joins=joins))
    found = set(minimum(values))
    wanted = [v for v in values.read if not values.is_there(v)]
    matter: dict[Value, None] = {}
    pending = list(wanted)
    while pending:
        value = pending.pop()
        matter[value] = None
        pending += [v for v in values.sources(value) or () if v not in matter]
    choices = [v for v in matter if v.op is not None and values.cost(v) < 1 << 62]
    assert 8 <= len(choices) <= 16
    best = min(price(values, set(c)) for n in range(len(choices)) for c in itertools.combinations(choices, n))
    behind = [v for op in found for v in op.operands] + wanted
    kept = {v for v in behind if v in matter and not (v.op in found and v is v.op.results[0])}
    for op in found:
        if op.name == "step.layer_norm":
            kept |= {r for r in op.results[1:] if r in matter}
    assert price(values, kept) == best < price(values, set(wanted))


class Stream(nn.Module):
    """A residual stream: every layer adds to it. Backward needs what `relu` reads, and not what `dropout` reads."""

    def __init__(self, depth: int, branch: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(depth))
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.branch(layer(norm(x)))
        return x


def streams(branch: Callable[[torch.Tensor], torch.Tensor], precision: str) -> Case:
    network = Stream(12, branch), lambda m, x: m(x).float().pow(2).mean(), (torch.randn(8, 16),)
    return Case(network, precision=precision)


def terms(value: Value, kept: set[Value]) -> set[Value]:
    """The kept values that a copy is computed from."""
    if value in kept or value.op is None:
        return {value} & kept
    return set().union(*[terms(v, kept) for v in value.op.operands])


def test_a_gate_is_computed_again_where_its_gradient_reads_it() -> None:
    """silu(gate) * up: both are kept for the gradient of the product, so the product itself need not be."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    case = Case((Gate(), lambda m, x: m(x).float().pow(2).mean(), (torch.randn(64, 8),)), precision="bf16")
    cut(case.program.module, limits=ALL)
    kept = [v for v in kept_values(block_of(case)) if v.type.shape == (64, 32)]
    assert len(kept) == 2 and all(v.op is not None and v.op.name == "step.contract" for v in kept)


def sums_again(case: Case) -> list[Op]:
    """Sums that backward computes again, but for those of the batch."""
    copies = [op for op in block_of(case) if op.attributes.get("again")]
    assert len(copies) >= 12
    return [op for op in copies if op.name == "step.add" and not any(v.op is None for v in op.operands)]


@pytest.mark.parametrize("padded", [False, True])
def test_images_in_16_bits_are_kept_where_bytes_that_move_count(padded: bool) -> None:
    """Through whatever cheap ops they come: backward would read the batch and write them once more."""

    def kept(limits: Limits) -> set[str]:
        stem = nn.Sequential(*[nn.ZeroPad2d((0, 1, 0, 1))] * padded, nn.Conv2d(3, 8, 3))
        case = Case((stem, lambda m, x: m(x).float().pow(2).mean(), (torch.randn(4, 3, 16, 16),)), precision="bf16")
        cut(case.program.module, limits=limits)
        found = [v.op for v in kept_values(block_of(case)) if v.type.shape[1:2] == (3,)]
        return {op.name for op in found if op is not None}

    assert not kept(ALL)
    assert kept(replace(ALL, products=1.25, anew=1.0)) == {"step.pad" if padded else "step.cast"}


def test_a_residual_stream_is_not_summed_up_again() -> None:
    case = streams(nn.functional.dropout, "fp32")
    cut(case.program.module, limits=ALL)
    assert not sums_again(case)


def test_every_other_sum_of_a_stream_in_f32_is_summed_up_again() -> None:
    """Each from the one before it, which is kept, and from a branch in bf16; where joins cost more all are kept."""
    case, dear = (streams(nn.functional.dropout, "bf16") for _ in range(2))
    cut(case.program.module, limits=ALL)
    cut(dear.program.module, limits=replace(ALL, joins=1.0))
    kept = set(kept_values(block_of(case)))
    sums = sums_again(case)
    for op in sums:
        read = terms(op.results[0], kept)
        assert sum(v.type.bytes for v in read) <= 1.6 * op.results[0].type.bytes  # (masks are drawn again)
        assert sum(v.op is not None and v.op.name == "step.add" for v in read) <= 1
    assert 5 <= len(sums) <= 6 and not sums_again(dear)
    assert kept_bytes(case.program.module) < kept_bytes(dear.program.module)


@pytest.mark.parametrize("reads", [2.0, 3.0, 5.0])
def test_no_copy_reads_more_than_the_limit(reads: float) -> None:
    """Where joins are for nothing the limit alone ends chains."""
    longest = 0
    free = Limits(reads=1e9, joined=10**9, ops=10**9, joins=0.0, least=0)
    for limits in (replace(free, reads=reads, ops=30), free):
        case = streams(torch.relu, "bf16")
        cut(case.program.module, limits=limits)
        kept = set(kept_values(block_of(case)))
        for op in block_of(case):
            if op.attributes.get("again") and not getattr(op.definition, "views", False):
                read = sum(v.type.bytes for v in terms(op.results[0], kept) if v.type.shape == op.results[0].type.shape)
                assert read <= limits.reads * op.results[0].type.bytes
                longest = max(longest, read // op.results[0].type.bytes)
    assert longest > 5  # without limits it is the whole stream


def test_few_ops_leave_longer_chains_kept() -> None:
    sizes = []
    for ops in (0, 1, 3, 30):
        case = Case(gpt(0.1), precision="bf16")
        keys = cut(case.program.module, limits=Limits(ops=ops, least=0))
        assert ops or all(key.split("/")[-1].split("#")[0] in ("reshape", "transpose", "slice") for key in keys)
        sizes.append(kept_bytes(case.program.module))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_small_values_are_left_alone() -> None:
    assert choose(Case(gpt()).program.module, limits=Limits(least=1 << 20)) == []


def test_numbers_are_not_drawn_twice_in_backward() -> None:
    case = Case((nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))]),
                 lambda m, x: m(x).pow(2).mean(), (torch.randn(4, 8),)))  # fmt: skip
    keys = cut(case.program.module, limits=ALL)
    assert any("/random#" in key for key in keys)
    streams = [op.stream for op in block_of(case) if op.definition is Random and is_late(op)]
    assert len(streams) == len(set(streams)) == 3


def test_a_copy_knows_the_statistics_of_its_original() -> None:
    for case, name in ((Case(convnet()), "step.batch_norm"), (Case(gpt()), "step.layer_norm")):
        cut(case.program.module, limits=ALL)
        found = {op: o for op, o in originals(block_of(case)).items() if op.name == name}
        assert found and len(set(found.values())) == len(found)
        for op, original in found.items():
            assert original.name == name and op.loc == original.loc and not is_late(original)
            assert not any(r.uses for r in op.results[1:])  # backward reads those of forward
            assert any(is_late(user) for user in original.results[1].uses)
        assert len(originals(block_of(case))) == sum(bool(op.attributes.get("again")) for op in block_of(case))


def test_running_statistics_are_not_read_in_backward() -> None:
    case = Case(convnet())
    cut(case.program.module, limits=ALL)
    running = [a for a in block_of(case).arguments if any("running" in str(n) for n in [a.name])]
    assert running and not any(is_late(user) for a in running for user in a.uses)


def described(block: Any) -> list[str]:
    return sorted(f"{op.name} {op.loc.layer} {op.phase}" for op in block)


def test_all_at_once_is_one_by_one() -> None:
    together, alone = Case(convnet()), Case(convnet())
    keys = cut(together.program.module, limits=ALL)
    for key in keys:
        apply_key(alone.program.module, key)
    assert described(block_of(together)) == described(block_of(alone))
    assert kept_bytes(together.program.module) == kept_bytes(alone.program.module)


def test_what_is_forbidden_stays() -> None:
    free, bound = Case(convnet()), Case(convnet())
    assert any(key.startswith("renormalize ") for key in choose(free.program.module, limits=ALL))
    keys = cut(bound.program.module, forbid=["renormalize *", "recompute */0/*"], limits=ALL)
    assert not any(key.startswith("renormalize ") or "/0/" in key for key in keys)
    everything = cut(free.program.module, forbid=["re*", "short_positions *"], limits=ALL)
    assert everything == []


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("recompute step/nowhere/forward/relu#0", "the program has no opportunity 'recompute step/nowhere"),
        ("pad step/4/forward/relu#0", "the program has no opportunity"),
        ("recompute step/3/forward/max_pool#7", "did you mean"),
    ],
)
def test_keys_that_fit_nothing(key: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        take(Case(convnet()).program.module, [key])


def test_an_op_that_nobody_reads_later_cannot_be_taken() -> None:
    """Nothing has been changed then, by the keys beside it either."""
    case = Case(convnet())
    site = next(s for s, op in sites(case.program.module).items() if op.operands and not late_results(op))
    before = str(case.program.module)
    with pytest.raises(InputError, match="no later phase reads it"):
        take(case.program.module, [*choose(case.program.module, limits=ALL), f"recompute {site}"])
    assert str(case.program.module) == before


def test_the_same_choice_every_time() -> None:
    first, second = (choose(Case(gpt(0.1)).program.module, limits=ALL) for _ in range(2))
    assert first == second != []
