"""`fit`: the same training as a loop written by hand, with callbacks, schedules, progress and honest ends."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import wholestep as ws
from wholestep.errors import InputError
from wholestep.integrations.fit import FitState, fit, items
from wholestep.integrations.progress import ProgressLine, short

torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        return self.layers(x)


def samples(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def loader(count: int = 24) -> DataLoader:
    return DataLoader(samples(count), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


def compiled(seed: int = 0, lr: float = 0.05):
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    example = tuple(t[:4] for t in samples().tensors)
    return ws.compile(model, nn.functional.cross_entropy, optimizer, example)


def by_hand(model, optimizer, scheduler=None, epochs=1, per_epoch=False):
    losses = []
    for batches in [loader()]:
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if scheduler is not None and not per_epoch:
                    scheduler.step()
            if scheduler is not None and per_epoch:
                scheduler.step()
    return losses


@pytest.mark.parametrize("per_epoch", [False, True])
def test_equals_a_loop_by_hand(per_epoch):
    step = compiled()
    twin = copy.deepcopy(step.model)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05)
    schedule = {"step_size": 2 if per_epoch else 5, "gamma": 0.5}
    expected = by_hand(twin, twin_optimizer, torch.optim.lr_scheduler.StepLR(twin_optimizer, **schedule), 3, per_epoch)
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, **schedule)
    history = fit(
        step, loader(), 3, scheduler=scheduler, scheduler_every="epoch" if per_epoch else "step", progress=False
    )
    assert history.steps == 18 and history.epochs == 3 and history.items == 72 and history.unit == "samples"
    torch.testing.assert_close(history.losses, expected, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(step.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert step.optimizer.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"] != 0.05


def test_a_plain_function_trains_in_the_same_loop():
    step, twin_step = compiled(), compiled()
    model, optimizer = twin_step.model, twin_step.optimizer

    def eager(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    ours, theirs = fit(step, loader(), progress=False), fit(eager, loader(), progress=False)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-6, atol=1e-7)
    assert ours.bytes_per_step == step.report().bytes > 0 and theirs.bytes_per_step is None


def test_plateau_schedule_sees_the_mean_loss_of_an_epoch():
    step = compiled()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(step.optimizer)
    with pytest.raises(InputError, match="scheduler_every"):
        fit(step, loader(), scheduler=scheduler, progress=False)
    history = fit(step, loader(), 2, scheduler=scheduler, scheduler_every="epoch", progress=False)
    means = [sum(history.losses[i : i + 6]) / 6 for i in (0, 6)]
    assert scheduler.best == pytest.approx(min(means))


class Recorder:
    """Notes every event."""

    def __init__(self, stop_at: int | None = None):
        self.events: list[str] = []
        self.losses: list[float] = []
        self.stop_at = stop_at

    def on_fit_begin(self, state: FitState) -> None:
        self.events.append("begin")

    def on_step_end(self, state: FitState) -> None:
        self.events.append(f"step {state.global_step} of epoch {state.epoch}")
        self.losses.append(state.loss)
        state.stop = state.global_step == self.stop_at

    def on_epoch_end(self, state: FitState) -> None:
        self.events.append(f"epoch {state.epoch}")

    def on_fit_end(self, state: FitState) -> None:
        self.events.append("end" if state.error is None else f"end by {type(state.error).__name__}")


def test_callbacks_in_order_and_stopping():
    recorder, rates = Recorder(stop_at=3), []
    history = fit(
        compiled(), loader(8), 5, callbacks=[recorder, lambda state: rates.append(state.lr)], progress=False,
    )  # fmt: skip
    assert recorder.events == [
        "begin", "step 1 of epoch 0", "step 2 of epoch 0", "epoch 1", "step 3 of epoch 1", "end",
    ]  # fmt: skip
    assert recorder.losses == pytest.approx(history.losses) and len(history.losses) == 3
    assert rates == [0.05] * 3 and history.epochs == 1


def test_max_steps():
    recorder = Recorder()
    assert fit(compiled(), loader(), None, max_steps=8, callbacks=[recorder], progress=False).steps == 8
    assert recorder.events[-1] == "end" and recorder.events.count("epoch 1") == 1 and "epoch 2" not in recorder.events
    assert fit(compiled(), loader(), 2, max_steps=12, progress=False).epochs == 2
    taken = iter(list(loader()))
    assert fit(compiled(), taken, 1, max_steps=2, progress=False).steps == 2
    assert len(list(taken)) == 4  # no batch was taken in vain


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(6), torch.tensor(1)


def test_a_loader_without_a_length():
    history = fit(compiled(), DataLoader(Endless(), batch_size=4), max_steps=3, progress=False)
    assert history.steps == 3 and history.epochs == 0


def test_keyword_batches():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t[:4] for t in samples().tensors)
    step = ws.compile(model, lambda model, x, y: nn.functional.cross_entropy(model(x), y), optimizer, {"x": x, "y": y})
    history = fit(step, [{"x": x, "y": y}] * 4, progress=False)
    assert history.steps == 4 and history.losses[-1] < history.losses[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_ends_cleanly_at_a_step_border(error, capsys):
    step, twin = compiled(), compiled()
    recorder = Recorder()

    def interrupt(state):
        if state.global_step == 3:
            raise error("now")

    with pytest.raises(error):
        fit(step, loader(), callbacks=[recorder, interrupt], log_every=1)
    assert recorder.events[-1] == f"end by {error.__name__}"
    assert capsys.readouterr().err.endswith("\n")
    fit(twin, loader(), max_steps=3, progress=False)
    for ours, theirs in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_losses_are_fetched_only_every_log_every_steps(monkeypatch):
    """Nothing asks a loss for its value between two reports."""
    fetched, batches = [], list(loader())  # the loader itself asks for numbers
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: fetched.append(t.numel()) or real(t))
    monkeypatch.setattr(torch.Tensor, "item", lambda t: pytest.fail("a loss was fetched by itself"))
    history = fit(lambda x, y: x.sum(), batches, 2, log_every=5, progress=False)
    assert fetched == [5, 5, 2] and history.steps == 12


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_between_reports():
    torch.manual_seed(0)
    model = Classifier().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    pinned = [tuple(t[:4].pin_memory() for t in samples().tensors)] * 12
    step = ws.compile(model, nn.functional.cross_entropy, optimizer, tuple(t.cuda() for t in pinned[0]), clip_norm=1.0)
    fit(step, pinned[:2], progress=False)  # what is made once may wait

    def strict(state):
        torch.cuda.set_sync_debug_mode("error" if state.global_step % 10 < 9 else "default")

    try:
        history = fit(step, pinned, log_every=10, callbacks=[strict], max_steps=10, progress=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert history.steps == 10 and history.peak_memory == torch.cuda.max_memory_allocated()


def test_plain_lines_where_stderr_is_a_file(capsys):
    fit(compiled(), loader(), 2, log_every=5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 5/12", "step 10/12", "step 12/12"]
    assert all("loss " in line and "samples/s" in line and "B/step" in line and "B memory" in line for line in lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "60")
    line = ProgressLine(8, stream)
    line.show(2, "loss 1 and a long note")
    line.show(8, "loss 1" + "x" * 100)
    line.close()
    first, second = stream.getvalue().split("\r")[1:]
    assert first == "step 2/8 [#####               ] loss 1 and a long note"
    assert second.startswith("step 8/8 [####################] loss 1") and len(second) == 60 and second[-1] == "\n"


def test_what_a_batch_counts():
    assert items(torch.zeros(4, 7, dtype=torch.int64)) == (28, "tokens")
    assert items((torch.zeros(4, 3, 8, 8), torch.zeros(4))) == (4, "images")
    assert items({"x": torch.zeros(4, 7)}) == (4, "samples")
    assert [short(n) for n in (9, 999, 12345, 4.5e6)] == ["9", "999", "12.3k", "4.5M"]


def test_bytes_per_step_are_plausible():
    step = compiled()
    history = fit(step, loader(4), progress=False)
    weights = sum(p.numel() * 4 for p in step.model.parameters())
    assert history.bytes_per_step > 7 * weights  # AdamW alone reads and writes tensors of that size seven times


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be a positive"),
        ({"max_steps": -1}, "max_steps must be a positive"),
        ({"log_every": 0}, "log_every must be a positive"),
        ({"epochs": None}, "say when to stop"),
        ({"callbacks": [object()]}, "has none of the methods on_fit_begin"),
        ({"callbacks": [Recorder]}, "Recorder is a class"),
        ({"scheduler": 3}, "learning-rate scheduler"),
        ({"scheduler_every": "day"}, "scheduler_every"),
        ({"loader": []}, "gave no batch; check"),
        ({"loader": iter([tuple(t[:4] for t in samples().tensors)]), "epochs": 2}, "an iterator can be read once"),
    ],
)
def test_bad_input(arguments, message):
    given = {"loader": loader(), "progress": False} | arguments
    with pytest.raises(InputError, match=message):
        fit(compiled(), **given)


def test_a_scheduler_of_another_optimizer():
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(InputError, match="another optimizer"):
        fit(compiled(), loader(), scheduler=torch.optim.lr_scheduler.StepLR(other, 1), progress=False)


def test_a_step_that_gives_no_loss():
    with pytest.raises(InputError, match=r"one number, not a tensor of shape \[4, 6\]"):
        fit(lambda x, y: x, loader(), progress=False)
    with pytest.raises(InputError, match="not int"):
        fit(3, loader(), progress=False)
