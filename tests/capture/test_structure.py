"""Nestings: flattened with readable paths, rebuilt as they were, compared in words."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from wholestep.capture.structure import Leaf, differences, find_loss, flatten, unflatten
from wholestep.errors import InputError

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    note: str = ""


def parts(value):
    tensors, names = [], []
    return flatten(value, tensors, names, "batch"), tensors, names


A, B = torch.zeros(2), torch.ones(3)

NESTINGS = [
    A,
    (A, B),
    [A, [B, None, 3, 2.5, True, "text", b"bytes", torch.float32, torch.device("cpu")]],
    {"a": A, "b": {"c": (B,)}, 3: None},
    OrderedDict(b=B, a=A),
    Pair(A, {"x": B}),
    Record(A, "kept"),
    (),
    {},
]


@pytest.mark.parametrize("value", NESTINGS, ids=lambda v: type(v).__name__)
def test_round_trip(value):
    structure, tensors, _ = parts(value)
    again = unflatten(structure, tensors)
    assert type(again) is type(value)
    if not isinstance(value, torch.Tensor):
        assert str(again) == str(value)
    assert parts(again)[0] == structure
    assert all(a is b for a, b in zip(parts(again)[1], tensors, strict=True))


def test_default_dicts_and_model_outputs():
    structure, tensors, _ = parts(defaultdict(list, a=A))
    assert type(unflatten(structure, tensors)) is defaultdict
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutput(loss=None, logits=B, hidden_states=(A, B))
    structure, tensors, names = parts(value)
    again = unflatten(structure, tensors)
    assert type(again) is type(value) and list(again) == ["logits", "hidden_states"] and again.loss is None
    assert names == ["batch.logits", "batch.hidden_states[0]", "batch.hidden_states[1]"]


def test_paths_name_the_place():
    assert parts((A, {"x": [A, B]}, Record(B)))[2] == ["batch[0]", "batch[1].x[0]", "batch[1].x[1]", "batch[2].x"]


def test_an_object_without_structure_is_refused_with_its_path():
    with pytest.raises(InputError, match=r"batch\[1\]\.x is a ndarray; only tensors, numbers"):
        parts((A, {"x": A.numpy()}))


@pytest.mark.parametrize(
    "before, now, message",
    [
        ((A, B), (A,), r"batch was tuple with \[0, 1\] when compiled and is tuple with \[0\] now"),
        ((A, B), [A, B], r"batch was tuple with \[0, 1\] when compiled and is list with \[0, 1\] now"),
        ({"x": A}, {"y": A}, r"batch was dict with \['x'\] when compiled and is dict with \['y'\] now"),
        ((A, (B,)), (A, B), r"batch\[1\] was tuple with \[0\] when compiled and is a tensor now"),
        ((A, B), (A, (B,)), r"batch\[1\] was a tensor when compiled and is tuple with \[0\] now"),
        ((A, 1), (A, 2), r"batch\[1\] was 1 when compiled and is 2 now"),
        ((A, 1), (A, True), r"batch\[1\] was 1 when compiled and is True now"),
        ((A, None), (A, B), r"batch\[1\] was None when compiled and is a tensor now"),
        ((A, B), (A, None), r"batch\[1\] was a tensor when compiled and is None now"),
    ],
)
def test_differences_in_words(before, now, message):
    (found,) = differences(parts(before)[0], parts(now)[0])
    assert re.fullmatch(message, found)


def test_equal_structures_do_not_differ():
    for value in NESTINGS:
        assert list(differences(parts(value)[0], parts(value)[0])) == []
    assert parts(A)[0] == Leaf(0)


def test_where_the_loss_is():
    loss = torch.tensor(1.0)
    assert find_loss(loss)[0] is loss
    assert find_loss((loss, A))[0] is loss
    assert find_loss({"logits": A, "loss": loss})[0] is loss
    assert find_loss(namedtuple("Out", "logits loss")(A, loss))[0] is loss
    for value in ({"logits": A}, (), "text", Record(A), 3.0):
        with pytest.raises(InputError, match=r"no loss found in the \w+ that was returned"):
            find_loss(value)
