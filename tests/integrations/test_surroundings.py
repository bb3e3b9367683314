"""A step where training loops really run: with workers, under a profiler, without gradients, from two threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import wholestep as ws
from wholestep.errors import InputError, WholestepError

torch.set_num_threads(1)
SIZE = 8


class Samples(Dataset):
    """Deterministic samples; may hold a step by mistake, and may even call it."""

    def __init__(self, held: object = None, call: bool = False):
        self.held, self.call = held, call

    def __len__(self) -> int:
        return 4 * SIZE

    def __getitem__(self, index: int):
        if self.call:
            self.held(*batch())
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.tensor(index % 3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SIZE, 6, generator=generator), torch.arange(SIZE) % 3


def compiled() -> ws.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return ws.compile(model, nn.functional.cross_entropy, optimizer, batch(), clip_norm=1.0)


def assert_same_weights(one: ws.TrainStep, other: ws.TrainStep) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("held", [False, True])
def test_a_loader_with_workers(held):
    """Two forked workers; with a step that the dataset (or a collate function) holds without calling it, too."""
    step, twin = compiled(), compiled()

    def collate(rows):
        assert step is not None  # a closure over the step
        return torch.utils.data.default_collate(rows)

    with_workers = DataLoader(
        Samples(step if held else None), SIZE, num_workers=2, multiprocessing_context="fork",
        collate_fn=collate if held else None,
    )  # fmt: skip
    for given, expected in zip(with_workers, DataLoader(Samples(), SIZE), strict=True):
        assert torch.equal(step(*given), twin(*expected))
    assert_same_weights(step, twin)


def test_a_step_called_in_a_worker_says_why_not():
    step = compiled()
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(InputError, match="DataLoader worker"):
        list(DataLoader(Samples(step, call=True), SIZE, num_workers=1, multiprocessing_context="fork"))
    assert all(torch.equal(before[k], v) for k, v in step.model.state_dict().items())


@pytest.mark.parametrize(
    "taken", [pickle.dumps, copy.deepcopy, lambda step: torch.save(step, io.BytesIO())], ids=["pickle", "copy", "save"]
)
def test_a_step_that_is_pickled_says_what_to_do(taken: Callable):
    """Also what a DataLoader that spawns its workers does with a step it finds in a dataset."""
    with pytest.raises(WholestepError, match="state_dict"):
        taken(compiled())


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch's own word about the same mistake
def test_spawned_workers_of_a_dataset_that_holds_a_step():
    with pytest.raises(WholestepError, match="state_dict"):
        list(DataLoader(Samples(compiled()), SIZE, num_workers=1, multiprocessing_context="spawn"))


def test_under_a_profiler():
    step, twin = compiled(), compiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses = [step(*batch()) for _ in range(3)]
    assert all(torch.equal(loss, twin(*batch())) for loss in losses)
    assert_same_weights(step, twin)
    seen = {event.key: event.count for event in profile.key_averages()}
    assert seen["aten::tanh"] == 3 and seen["aten::tanh_backward"] == 3  # the program's ops, forward and backward


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_turned_off_by_mistake(mode):
    """A compiled step needs no autograd: it trains all the same, and what it makes can be trained on eagerly after."""
    step, twin = compiled(), compiled()
    with mode():
        losses = [step(*batch()) for _ in range(3)]
    assert [loss.item() for loss in losses] == [twin(*batch()).item() for _ in range(3)]
    assert_same_weights(step, twin)
    nn.functional.cross_entropy(step.model(batch()[0]), batch()[1]).backward()
    step.optimizer.step()
    assert not any(p.is_inference() for p in step.model.parameters())


def test_compiled_without_gradients_by_mistake():
    twin = compiled()
    with torch.no_grad():
        step = compiled()
    assert torch.equal(step(*batch()), twin(*batch()))
    assert_same_weights(step, twin)


def test_two_threads():
    """Steps from two threads take turns: with one batch, any order gives the same weights as one thread does."""
    step, twin = compiled(), compiled()
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def train():
        try:
            start.wait(timeout=30)
            for _ in range(20):
                step(*batch())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for _ in range(40):
        twin(*batch())
    assert_same_weights(step, twin)


def test_compiled_in_one_thread_and_run_in_another():
    made: list[ws.TrainStep] = []
    thread = threading.Thread(target=lambda: made.append(compiled()))
    thread.start()
    thread.join(timeout=60)
    twin = compiled()
    assert torch.equal(made[0](*batch()), twin(*batch()))
    assert_same_weights(made[0], twin)
