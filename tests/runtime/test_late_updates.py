"""`updates="in_next_forward"`: a step leaves its update to the next one, and nobody who asks us sees old parameters."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.plan.networks import TinyGPT, convnet, next_word
from tests.runtime.runs import Perceptron, adamw, assert_same, data, fresh, sgd, squares
from wholestep.errors import InputError, OptimizerError
from wholestep.transforms.late_updates import KEPT

LATE: dict[str, Any] = {"updates": "in_next_forward"}
PROVIDERS = [["aten"], ["aten", "cpp"]]
CPP: dict[str, Any] = LATE | {"providers": PROVIDERS[1]}


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, eps=0.1)


def gpt() -> nn.Module:
    """Biases of keys have no gradient but noise, which Adam would make much of."""
    model = TinyGPT(layers=1)
    for layer in model.layers:
        layer.attention.qkv.bias.requires_grad_(False)
    return model


def ids(seed: int = 0, length: int = 8) -> torch.Tensor:
    return torch.randint(0, 31, (4, length), generator=torch.Generator().manual_seed(seed))


def words(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return next_word(model(batch), batch)


class Twins:
    """A model that trains with late updates, and one that trains eagerly, on the same batches."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss_fn: Callable[..., torch.Tensor],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        batch: tuple[torch.Tensor, ...],
        schedule: bool = False,
        **options: Any,
    ):
        self.model, self.twin, self.loss_fn = fresh(make), fresh(make), loss_fn
        self.optimizer, self.twins = optimizer(self.model), optimizer(self.twin)
        self.clip = options.get("clip_norm")
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.7) for o in (self.optimizer, self.twins)]
        self.schedule = schedule
        self.step = ws.compile(self.model, loss_fn, self.optimizer, batch, **LATE | options)

    def train(self, *batch: torch.Tensor) -> None:
        loss = self.step(*batch)
        self.twins.zero_grad()
        expected = self.loss_fn(self.twin, *batch)
        expected.backward()
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip)
            torch.testing.assert_close(self.step.last.grad_norm, norm)
        self.before = [p.detach().clone() for p in self.twin.parameters()]
        self.twins.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        if self.schedule:
            for scheduler in self.schedulers:
                scheduler.step()

    def behind(self) -> bool:
        """Whether the model's parameters are those before the last update."""
        return all(
            torch.allclose(p, q, rtol=1e-5, atol=1e-6)
            for p, q in zip(self.model.parameters(), self.before, strict=True)
        )

    def same(self) -> None:
        assert self.step._waiting is None
        assert_same(self.model, self.twin)
        ours, theirs = self.optimizer.state_dict(), self.twins.state_dict()
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-4, atol=1e-6)


@pytest.fixture
def twins() -> Twins:
    """With an update that waits."""
    found = Twins(Perceptron, squares, adamw, (data(6, 4),), clip_norm=0.1)
    for seed in range(3):
        found.train(data(6, 4, seed=seed))
    assert found.behind() and found.step._waiting is not None
    return found


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("providers", PROVIDERS, ids=["aten", "cpp"])
@pytest.mark.parametrize("optimizer", [sgd, adamw, rmsprop])
def test_training_is_eager_training(optimizer: Any, providers: list[str]) -> None:
    """With tied weights, clipping by the norm, and a schedule: the rate of the step that made the gradients counts."""
    pair = Twins(gpt, words, optimizer, (ids(),), schedule=True, clip_norm=0.5, providers=providers)
    for seed in range(5):
        pair.train(ids(seed))
        assert pair.behind()
    pair.step.flush()
    pair.same()


def test_bit_for_bit_what_the_ordinary_step_does() -> None:
    """With PyTorch's kernels: losses, norms, and after a flush parameters and state."""
    late, plain = fresh(gpt), fresh(gpt)
    steps = [
        ws.compile(m, words, adamw(m), (ids(),), clip_norm=0.5, providers=["aten"], **options)
        for m, options in ((late, LATE), (plain, {}))
    ]
    for seed in range(4):
        one, other = (step(ids(seed)) for step in steps)
        assert torch.equal(one, other) and torch.equal(steps[0].last.grad_norm, steps[1].last.grad_norm)
    found, expected = (step.state_dict() for step in steps)
    assert all(torch.equal(found["model"][k], v) for k, v in expected["model"].items())
    for number, state in expected["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][number][k], v) for k, v in state.items())


@pytest.mark.parametrize(
    "options",
    [
        {"level": 0},
        {"precision": "bf16", "clip_norm": 0.5},
        {"precision": "fp16", "clip_norm": 0.5, "loss_scale": 2.0**40},
        {"accumulate": 2, "clip_value": 0.01},
        {"skip_nonfinite": True, "ema": 0.9},
        {"recipe": ()},
    ],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("providers", PROVIDERS, ids=["aten", "cpp"])
def test_options_go_together_with_it(options: dict[str, Any], providers: list[str]) -> None:
    """As the ordinary step with the same options; a loss scale that is too large at first skips updates."""
    late, plain = fresh(gpt), fresh(gpt)
    a, b = (
        ws.compile(m, words, adamw(m), (ids(),), providers=providers, tune=False, **options, **more)
        for m, more in ((late, LATE), (plain, {}))
    )
    for seed in range(6):
        loss, expected = a(ids(seed)), b(ids(seed))
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        if "precision" in options and options["precision"] == "fp16":
            assert bool(a.last.skipped) == bool(b.last.skipped)
    found, expected = a.state_dict(), b.state_dict()
    torch.testing.assert_close(found["model"], expected["model"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["optimizer"]["state"], expected["optimizer"]["state"], rtol=1e-3, atol=1e-5)
    assert found["random"] == expected["random"] and found.get("scaler") == expected.get("scaler")
    if "ema" in options:
        torch.testing.assert_close(a.ema_state_dict(), b.ema_state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("providers", PROVIDERS, ids=["aten", "cpp"])
def test_buffers_change_in_their_own_step(providers: list[str]) -> None:
    """Statistics of BatchNorm are those of forward, and do not wait."""
    _, _, (x, y) = convnet()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    pair = Twins(lambda: convnet()[0], loss, sgd, (x, y), clip_norm=0.5, providers=providers)
    for _ in range(3):
        pair.train(x, y)
        for (name, one), other in zip(pair.model.named_buffers(), pair.twin.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
    pair.step.flush()
    assert_same(pair.model, pair.twin, rtol=1e-4, atol=1e-5)


def test_shapes_that_change() -> None:
    """An update does not wait for a step of another shape: it is done first."""
    pair = Twins(gpt, words, adamw, (ids(),), clip_norm=0.5, shapes="bucket")
    for seed, length in enumerate([8, 8, 5, 5, 8, 6, 8, 8]):
        pair.train(ids(seed, length))
    assert pair.step.compilations == 3
    pair.step.flush()
    pair.same()


def test_groups_and_frozen_layers_that_change() -> None:
    """What is compiled anew finds parameters up to date; the update that waited is made as it was meant."""
    pair = Twins(Perceptron, squares, sgd, (data(6, 4),))
    pair.train(data(6, 4))
    pair.train(data(6, 4, seed=1))
    for optimizer in (pair.optimizer, pair.twins):
        optimizer.param_groups[0]["weight_decay"] = 0.5
    pair.train(data(6, 4, seed=2))
    for model in (pair.model, pair.twin):
        model.first.requires_grad_(False)
        model.first.weight.grad = model.first.bias.grad = None
    for seed in range(3):
        pair.train(data(6, 4, seed=seed))
    pair.step.flush()
    assert_same(pair.model, pair.twin)


def test_a_rate_that_is_changed_counts_for_the_gradients_to_come() -> None:
    pair = Twins(Perceptron, squares, sgd, (data(6, 4),))
    for rate in (0.1, 0.0, 0.3, 0.2):
        for optimizer in (pair.optimizer, pair.twins):
            optimizer.param_groups[0]["lr"] = rate
        pair.train(data(6, 4))
    for optimizer in (pair.optimizer, pair.twins):
        optimizer.param_groups[0]["lr"] = 100.0
    pair.step.flush()
    pair.same()


# ---- who sees what ---------------------------------------------------------------------------------------------------


def read_model(pair: Twins) -> None:
    pair.model.state_dict()


def read_optimizer(pair: Twins) -> None:
    pair.optimizer.state_dict()


def read_step(pair: Twins) -> None:
    pair.step.state_dict()


def evaluate(pair: Twins) -> None:
    with torch.no_grad():
        torch.testing.assert_close(pair.model(data(2, 4)), pair.twin(data(2, 4)))


def under_inference_mode(pair: Twins) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(pair.model(data(2, 4)), pair.twin(data(2, 4)))


def go(pair: Twins) -> None:
    """A step that is no longer held by anybody does its last update."""
    step, pair.step = pair.step, None  # type: ignore[assignment]
    gc.disable()
    try:
        del step  # nothing else holds it, so it goes at once
    finally:
        gc.enable()
    assert not pair.model._forward_pre_hooks and not pair.optimizer._optimizer_step_pre_hooks
    assert_same(pair.model, pair.twin)


@pytest.mark.parametrize("reads", [read_model, read_optimizer, read_step, evaluate, under_inference_mode, go])
def test_whoever_asks_us_finds_it_up_to_date(twins: Twins, reads: Callable[[Twins], None]) -> None:
    reads(twins)
    if twins.step is not None:
        twins.same()
        twins.train(data(6, 4, seed=9))
        twins.step.flush()
        twins.same()


def test_eager_steps_in_between(twins: Twins) -> None:
    for model, optimizer in ((twins.model, twins.optimizer), (twins.twin, twins.twins)):
        optimizer.zero_grad()
        squares(model, data(6, 4, seed=5)).backward()
        optimizer.step()
    twins.train(data(6, 4, seed=6))
    twins.step.flush()
    twins.same()


def test_an_eager_step_of_gradients_alone(twins: Twins) -> None:
    """Without a call of the model: the optimizer itself flushes before it steps."""
    for model, optimizer in ((twins.model, twins.optimizer), (twins.twin, twins.twins)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    twins.same()


def test_another_step_of_the_same_model(twins: Twins) -> None:
    other = ws.compile(twins.model, squares, twins.optimizer, (data(6, 4),), clip_norm=0.1)
    for seed in (7, 8):
        late, twins.step = twins.step, other
        twins.train(data(6, 4, seed=seed))
        twins.step = late
        twins.train(data(6, 4, seed=seed + 10))
    twins.step.flush()
    twins.same()


def test_a_checkpoint_in_the_middle_and_resuming_from_it(twins: Twins) -> None:
    file = io.BytesIO()
    torch.save(twins.step.state_dict(), file)
    twins.train(data(6, 4, seed=20))
    file.seek(0)
    model = fresh(Perceptron, seed=3)
    optimizer = adamw(model)
    step = ws.compile(model, squares, optimizer, (data(6, 4),), clip_norm=0.1, **LATE)
    step(data(6, 4, seed=4))  # its update waits, and must not come after what is loaded
    step.load_state_dict(torch.load(file))
    step(data(6, 4, seed=20))
    step.flush()
    assert_same(model, twins.twin)


def test_loading_a_model_alone(twins: Twins) -> None:
    """Nothing of an update that waited comes after what is loaded."""
    state = fresh(Perceptron, seed=3).state_dict()
    twins.model.load_state_dict(state)
    twins.step.flush()
    assert all(torch.equal(v, state[k]) for k, v in twins.model.state_dict().items())


def test_writing_a_parameter_while_its_update_waits_is_an_error(twins: Twins) -> None:
    with torch.no_grad():
        twins.model.first.weight.clamp_(-0.1, 0.1)
    with pytest.raises(InputError, match=r"step\.flush\(\) before writing"):
        twins.step(data(6, 4))
    twins.step.flush()
    twins.step(data(6, 4))


def test_writing_a_parameter_after_a_flush(twins: Twins) -> None:
    twins.step.flush()
    for model in (twins.model, twins.twin):
        with torch.no_grad():
            model.first.weight.clamp_(-0.1, 0.1)
    twins.train(data(6, 4, seed=5))
    twins.step.flush()
    twins.same()


def test_copies_of_the_model_belong_to_no_step(twins: Twins) -> None:
    twins.step.flush()
    file = io.BytesIO()
    torch.save(twins.model, file)
    file.seek(0)
    for other in (copy.deepcopy(twins.model), torch.load(file, weights_only=False)):
        twins.train(data(6, 4, seed=5))
        other(data(2, 4))
        assert twins.step._waiting is not None


def test_a_step_that_fails_leaves_the_model_after_the_one_before() -> None:
    """The update of the step before is done all the same, whole; the next good step goes on from there."""
    pair = Twins(gpt, words, adamw, (ids(),), clip_norm=0.5, providers=["aten"])
    for at in (1, 3):
        for seed in range(at):
            pair.train(ids(seed))
        bad = ids(7)
        bad[1, 3] = 99
        with pytest.raises(IndexError):
            pair.step(bad)
        pair.same()
    pair.train(ids(8))
    pair.step.flush()
    pair.same()


def test_a_first_step_that_fails_changes_nothing() -> None:
    pair = Twins(gpt, words, adamw, (ids(),), providers=["aten"])
    with pytest.raises(IndexError):
        pair.step(ids() + 99)
    pair.same()
    pair.train(ids())
    pair.step.flush()
    pair.same()


# ---- what it says of itself ------------------------------------------------------------------------------------------


def test_the_report_and_the_plan(twins: Twins) -> None:
    step = twins.step
    report, plan = step.report(), step.plan()
    size = sum(p.numel() * p.element_size() for p in twins.model.parameters())
    assert report.ops["update"] > 0 and report.state["gradients between steps"] >= size
    kept = [b for b in plan.buffers if b.argument >= 0 and b.lifetime == "grad"]
    assert sum(b.type.bytes for b in kept) == report.state["gradients between steps"]
    plain = ws.compile(twins.model, squares, twins.optimizer, (data(6, 4),), clip_norm=0.1).plan()
    assert plan.bytes_in("external") == plain.bytes_in("external") + sum(b.type.bytes for b in kept)
    assert "in the next forward; one waits for it" in str(report) and "update" in report.movement.ledger.by_phase()
    assert '"updates": "in_next_forward"' in step.report("json")
    assert "kept kept" not in step.report("json") and "kept contract" in step.report("json")


def test_saved_and_loaded(twins: Twins, tmp_path: Any) -> None:
    twins.step.save(tmp_path / "step.json")
    assert twins.step._waiting is not None  # there are no weights in it
    twins.step.flush()
    twins.step = ws.load(tmp_path / "step.json", twins.model, squares, twins.optimizer)
    assert twins.step.options.updates == "in_next_forward"
    for seed in range(3):
        twins.train(data(6, 4, seed=seed))
    assert twins.behind()
    twins.step.flush()
    twins.same()


def test_the_first_step_is_verified() -> None:
    pair = Twins(Perceptron, squares, adamw, (data(6, 4),), verify=True, providers=["aten"])
    pair.train(data(6, 4))
    pair.train(data(6, 4, seed=1))
    pair.step.flush()
    assert pair.step.verified
    pair.same()


def test_every_launch_can_be_announced(twins: Twins) -> None:
    twins.step.annotated(data(6, 4))
    twins.step.flush()
    twins.step.annotated(data(6, 4))


def test_a_recipe_is_done_again() -> None:
    steps = []
    for options in ({}, {"recipe": True}):
        model = fresh(Perceptron)
        if options:
            options = {"recipe": steps[0].recipe}
        steps.append(ws.compile(model, squares, adamw(model), (data(6, 4),), clip_norm=0.1, **CPP, **options))
    assert any(key.startswith("fuse ") for key in steps[0].recipe)
    assert steps[1].recipe == steps[0].recipe
    assert [float(steps[0](data(6, 4))) for _ in range(3)] == [float(steps[1](data(6, 4))) for _ in range(3)]


def test_what_is_forbidden_may_fit_one_of_the_programs_alone() -> None:
    model = fresh(Perceptron)
    step = ws.compile(model, squares, adamw(model), (data(6, 4),), forbid=["fuse */update/*"], **CPP)
    step(data(6, 4))
    step.flush()
    with pytest.raises(InputError, match="fits no fusion"):
        ws.compile(model, squares, adamw(model), (data(6, 4),), forbid=["fuse */nothing/*"], **CPP)


def test_fit_ends_up_to_date() -> None:
    model, seen = fresh(Perceptron), []
    step = ws.compile(model, squares, sgd(model), (data(6, 4),), **LATE)

    class Callback:
        def on_epoch_end(self, state: Any) -> None:
            seen.append(step._waiting)

        def on_fit_end(self, state: Any) -> None:
            seen.append(step._waiting)

    ws.fit(step, [(data(6, 4),)] * 3, epochs=2, callbacks=[Callback()], progress=False)
    assert seen == [None, None, None]


def test_nothing_is_bound_or_allocated_again(twins: Twins) -> None:
    """Step after step runs on the same memory."""
    step = twins.step
    compiled = step._compiled
    static = compiled.static
    kept = {source: t.data_ptr() for source, t in compiled.kept.items()}
    bindings = static.bindings
    for seed in range(3):
        twins.train(data(6, 4, seed=seed))
    assert static.bindings == bindings and step.compilations == 1
    arguments = [i for i, slot in enumerate(compiled.program.slots) if slot.kind == KEPT]
    bound = {compiled.program.slots[i].source: static.bound.memory.tensor(i).data_ptr() for i in arguments}
    assert bound == kept == {source: t.data_ptr() for source, t in compiled.late.first.kept.items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("updates", ["in_next_forward", "beside_next_forward"])
def test_on_a_gpu(updates: str, precision: str) -> None:
    """As one CUDA graph, on one stream or on two: what the ordinary step comes to."""
    steps = []
    for each in (updates, "in_step"):
        model = fresh(gpt).cuda()
        options = {"precision": precision, "clip_norm": 0.5, "updates": each}
        steps.append(ws.compile(model, words, adamw(model, 1e-3), (ids().cuda(),), **options))
    for seed in range(12):
        one, other = (step(ids(seed).cuda()) for step in steps)
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
        if seed == 7:
            steps[0].flush()
    assert steps[0]._compiled.static.graph.graph is not None and not steps[0]._compiled.static.graph.refused
    ours, theirs = (step.state_dict() for step in steps)
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-2, atol=1e-3)


# ---- what it refuses -------------------------------------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Keeps a Python number that every update changes."""

    def __init__(self, params: Iterator[nn.Parameter]):
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (group["k"] + 1))
            group["k"] += 1


class Plain(torch.optim.Optimizer):
    """One that is not torch's own, and whose update can wait."""

    def __init__(self, params: Iterator[nn.Parameter]):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].lerp_(p.grad, 0.1)
                    p.add_(state["mean"].sign(), alpha=-group["lr"])


def test_optimizers_of_others() -> None:
    pair = Twins(Perceptron, squares, lambda m: Plain(m.parameters()), (data(6, 4),), schedule=True)
    for seed in range(4):
        pair.train(data(6, 4, seed=seed))
    pair.step.flush()
    pair.same()
    assert pair.step.compilations == 1
    model = fresh(Perceptron)
    with pytest.raises(OptimizerError, match="in_step"):
        ws.compile(model, squares, Counting(model.parameters()), (data(6, 4),), **LATE)


def test_what_cannot_be_done_is_refused() -> None:
    model = fresh(Perceptron)
    with pytest.raises(InputError, match="did you mean 'in_next_forward'"):
        ws.compile(model, squares, sgd(model), (data(6, 4),), updates="next_forward")
    with pytest.raises(InputError, match="memory_budget"):
        ws.compile(model, squares, sgd(model), (data(6, 4),), memory_budget=0.9, **LATE)
    with pytest.raises(InputError, match="second stream"):
        ws.compile(model, squares, sgd(model), (data(6, 4),), updates="beside_next_forward")
    assert not model._forward_pre_hooks and not model._state_dict_pre_hooks


def test_a_model_that_moves_while_an_update_waits(twins: Twins) -> None:
    twins.model.to("meta")
    with pytest.raises(InputError, match="before moving the model"):
        twins.step.flush()
    twins.step.flush()  # it was lost
