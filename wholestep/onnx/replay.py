"""An imported graph run op by op by PyTorch, with gradients by its autograd: the rival of `bench`.

A module of ONNX has no eager form of its own in torch. This one makes the same calls that the reference executor makes,
in order, as plain torch code for the shapes of one batch; torch.autocast and torch.compile see every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..runtime.executor import Executable
from .errors import OnnxError
from .module import OnnxModule, arrange, draw_key, one_device


class Replay(nn.Module):
    """Trains the parameters of `model`, on batches of the shapes of `batch`."""

    def __init__(self, model: OnnxModule, batch: Sequence[torch.Tensor]):
        super().__init__()
        self.model = model
        self.shapes = [tuple(x.shape) for x in batch]
        state = model.initializers()
        device = one_device([*batch, *state.values()])
        found = model._graph.specialise(list(batch), model.training)
        executable = Executable(found.function, device)
        self.sources = [(s.kind, s.name) for s in found.sources]
        self.constants = found.constants(device)
        self.fixed = dict(executable.fixed)
        self.calls = [(run, reads, writes) for run, reads, writes, _, _ in executable.calls]
        self.results = [slot for slot, _ in executable.results]
        self.outputs, self.structure, self.updated = found.outputs, found.structure, found.updated
        self.paths = {name: found.path for name, found in model._graph.state.items()}

    def forward(self, *batch: torch.Tensor) -> Any:
        if [tuple(x.shape) for x in batch] != self.shapes:
            raise OnnxError(f"this was made for the shapes {self.shapes}")
        slots: dict[int, Any] = dict(self.fixed)
        for index, (kind, name) in enumerate(self.sources):
            if kind == "input":
                slots[index] = batch[int(name)]
            elif kind == "state":
                tensor = self.model._tensor(self.paths[name])
                # backward sees the statistics as they were
                slots[index] = tensor.clone() if name in self.updated else tensor
            else:
                slots[index] = draw_key() if kind == "key" else self.constants[index]
        for run, reads, writes in self.calls:
            out = run(*[slots[i] for i in reads])
            if isinstance(writes, int):
                slots[writes] = out
            else:
                slots.update(zip(writes, out, strict=True))
        results = [slots[slot] for slot in self.results]
        with torch.no_grad():
            for name, new in zip(self.updated, results[self.outputs :], strict=True):
                self.model._tensor(self.paths[name]).copy_(new)
        arranged = [arrange(part, results) for part in self.structure]
        return arranged[0] if len(arranged) == 1 else tuple(arranged)
