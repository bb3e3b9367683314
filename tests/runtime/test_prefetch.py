"""`ws.prefetch`: the batches of a loader in their order, whatever they are made of, sent ahead where there is a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import wholestep as ws
from tests.runtime.runs import Perceptron, data, fresh, sgd, squares
from wholestep.errors import InputError
from wholestep.runtime.prefetch import Prefetch


def test_batches_come_in_order_and_again():
    batches = [(data(2, 4, seed=i), torch.tensor([i])) for i in range(5)]
    loader = ws.prefetch(batches, "cpu")
    for _ in range(2):
        found = list(loader)
        assert [int(label) for _, label in found] == [0, 1, 2, 3, 4]
        assert all(torch.equal(x, y) for (x, _), (y, _) in zip(found, batches, strict=True))


def test_nested_batches_keep_their_structure():
    batch = {"x": data(2, 4), "more": [data(1), (data(2), data(3))]}
    (found,) = ws.prefetch([batch], "cpu")
    assert list(found) == ["x", "more"]
    assert torch.equal(found["x"], batch["x"]) and torch.equal(found["more"][1][1], batch["more"][1][1])
    assert isinstance(found["more"], list) and isinstance(found["more"][1], tuple)


def test_a_loader_of_torch_and_the_step_as_the_device():
    loader = DataLoader(TensorDataset(data(12, 4)), batch_size=4)
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(4, 4),))
    batches = ws.prefetch(loader, step)
    assert batches.device == step.device and len(batches) == 3
    losses = [float(step(*batch)) for batch in batches]
    twin = fresh(Perceptron)
    other = ws.compile(twin, squares, sgd(twin), (data(4, 4),))
    assert losses == [float(other(*batch)) for batch in loader]


def test_the_length_is_the_loaders():
    assert len(ws.prefetch([(data(1),)] * 7, "cpu")) == 7
    with pytest.raises(TypeError):
        len(ws.prefetch(iter([(data(1),)]), "cpu"))


@pytest.mark.parametrize("ahead", [0, -1])
def test_at_least_one_batch_is_under_way(ahead):
    with pytest.raises(InputError, match=f"at least 1, not {ahead}"):
        ws.prefetch([], "cpu", ahead=ahead)


def test_an_error_of_the_loader_arrives():
    def loader():
        yield (data(1),)
        raise OSError("the disk is gone")

    batches = iter(ws.prefetch(loader(), "cpu"))
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


@pytest.mark.parametrize(("ahead", "first_sent"), [(1, 2), (2, 3), (9, 5)])
def test_on_a_gpu_batches_are_sent_before_they_are_asked_for(monkeypatch, ahead, first_sent):
    """A stand-in for the device: what is sent when."""
    sent: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(Prefetch, "_sent", lambda self, batch, stream: sent.append(batch) or (batch, [], None))
    monkeypatch.setattr(Prefetch, "_arrived", lambda self, batch, tensors, event: batch)
    batches = iter(Prefetch(range(5), "cuda", ahead))
    assert sent == []
    assert next(batches) == 0
    assert sent == list(range(first_sent))
    assert list(batches) == [1, 2, 3, 4] and sent == [0, 1, 2, 3, 4]


def test_without_a_device_batches_go_where_this_machine_computes():
    there = "cuda" if torch.cuda.is_available() else "cpu"
    (batch,) = ws.prefetch([(data(2, 4),)])
    assert batch[0].device.type == there


@pytest.mark.parametrize("given", ["step", "", 1.5, [], torch.nn.Linear(2, 2)])
def test_what_is_no_place_for_batches_is_refused(given):
    with pytest.raises(
        InputError, match=r"to a compiled step, or to a device such as \"cuda\", not to .*Try: ws.prefetch"
    ):
        ws.prefetch([], given)


@pytest.mark.parametrize(
    ("given", "message"), [({"loader": 5}, "goes through a loader"), ({"loader": [], "ahead": 1.5}, "at least 1")]
)
def test_what_is_no_loader_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ws.prefetch(**given)
