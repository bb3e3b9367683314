"""The executor: frees what nobody reads again, and says which layer an error comes from."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from tests.runtime.runs import Perceptron, data, fresh, sgd, squares
from wholestep.errors import WholestepError


def executable():
    model = fresh(Perceptron)
    return ws.compile(model, squares, sgd(model), (data(3, 4),))._compiled.executable


def test_every_intermediate_is_freed_at_its_last_use():
    run = executable()
    results = {slot for slot, _ in run.results}
    written = {w for _, _, writes, _, _ in run.calls for w in (writes if isinstance(writes, tuple) else (writes,))}
    freed = [slot for _, _, _, frees, _ in run.calls for slot in frees]
    assert len(freed) == len(set(freed))
    assert written - results <= set(freed)
    seen: set[int] = set()
    for _, reads, _, frees, _ in run.calls:
        assert not seen & set(reads), "a slot is read after it was freed"
        seen |= set(frees)


def test_the_wrong_number_of_inputs():
    with pytest.raises(WholestepError, match=r"takes \d+ tensors, 1 were given"):
        executable()([torch.zeros(1)])


@pytest.mark.parametrize("error, expected", [(RuntimeError, RuntimeError), (ValueError, WholestepError)])
def test_an_error_names_its_op_and_layer(error, expected):
    run = executable()
    index = next(i for i, call in enumerate(run.calls) if call[4].loc.layer == "second")

    def fail(*_):
        raise error("the device is on fire")

    run.calls[index] = (fail, *run.calls[index][1:])
    inputs = [torch.zeros(a.type.shape) for a in run.function.regions[0].block.arguments]
    with pytest.raises(expected, match=r"step\.\w+ of layer second at .*: the device is on fire") as caught:
        run(inputs)
    assert isinstance(caught.value.__cause__, error)
