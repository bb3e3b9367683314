"""Padding of shorter sequences up to a bucket, used only where the model's own masks make it exact.

Whether they do is measured, once per step and again when modes change: loss, outputs, gradients and statistics of a
batch, padded and not, must agree in float32 with random draws held still. Otherwise every length gets its own program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..capture.capture import capture
from ..capture.sandbox import keep_random_state
from ..capture.structure import unflatten
from ..dialects.step import StepBuilder
from ..errors import InputError, WholestepError
from ..ir.builtin import finish_function
from ..ir.core import Op
from ..ir.passes import run_pipeline
from ..options import Options
from ..training.autodiff import gradients
from ..training.traced_vjp import VjpCache
from .batches import first_micro_batch, flattened
from .executor import Executable

#: what the names of `transformers` batches are padded with, where the batch brings an attention mask
CONVENTION = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "labels": -100,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
}
SMALLEST = 16
#: how far loss and gradients may be apart, relative to the loss and to the largest gradient: other orders of summation
TOLERANCE = 1e-4


class Cut(NamedTuple):
    """How outputs are cut back: the length of the batch as padded, its true length, and the dimensions per output."""

    padded: int
    length: int
    dimensions: tuple[tuple[int, ...], ...] = ()


class Measured(NamedTuple):
    """What one batch gives: the loss, the outputs, and gradients and new statistics by name."""

    loss: float
    outputs: list[torch.Tensor]
    state: dict[str, torch.Tensor]


class Padding:
    """Decides for one step whether batches are padded, and pads them."""

    def __init__(self, options: Options):
        self.values: Mapping[str, float] | None = options.pad
        self.accumulate = options.accumulate
        self.exact: bool | None = None
        self.reason = ""
        #: which dimensions of each output are the sequence's, and the modes for which all this was measured
        self.dimensions: tuple[tuple[int, ...], ...] = ()
        self.measured_for: Any = None

    def fill(self, step: Any, batch: Any) -> tuple[Any, Cut | None]:
        """The batch at the length of its bucket, or as it is where padding would change the result.

        Also gives how outputs are cut back.
        """
        padded, cut = self.padded(batch)
        if cut is None:
            return batch, None
        modes = modes_of(step)
        if modes != self.measured_for:
            self.reason = self.difference(step, batch, padded, cut)
            self.exact, self.measured_for = not self.reason, modes
        return (padded, cut._replace(dimensions=self.dimensions)) if self.exact else (batch, None)

    def description(self) -> str:
        """What became of padding, for the report."""
        if self.exact:
            return "shorter sequences are padded to their bucket: checked to be exact on the first one"
        return f"sequences are not padded: {self.reason}" if self.reason else ""

    def padded(self, batch: Any) -> tuple[Any, Cut | None]:
        """The batch filled up along dimension 1; as it is where it has its bucket's length or padding is not known."""
        tensors, names, structure = flattened(batch)
        keys = [".".join(re.findall(r"[^.\[\]]+", name.removeprefix("batch"))) for name in names]
        values = self.values
        if values is None:
            values = CONVENTION if "attention_mask" in keys else {}
        else:
            for unknown in (name for name in values if name not in keys):
                raise InputError(f"pad names {unknown!r}, which is no tensor of the batch; it has {', '.join(keys)}")
        lengths = {t.shape[1] for t, key in zip(tensors, keys, strict=True) if key in values and t.dim() > 1}
        if len(lengths) > 1:
            self.reason = f"sequences of one batch have different lengths ({', '.join(map(str, sorted(lengths)))})"
        if len(lengths) != 1:
            return batch, None
        (length,) = lengths
        wanted = bucket(length)
        if wanted == length:
            return batch, None
        filled = []
        for tensor, key in zip(tensors, keys, strict=True):
            if tensor.dim() > 1 and tensor.shape[1] == length:
                if key not in values:
                    self.reason = f"batch.{key} has the length of a sequence and pad= does not say how to fill it"
                    return batch, None
                ends = (0, 0) * (tensor.dim() - 2) + (0, wanted - length)
                tensor = F.pad(tensor, ends, value=values[key])
            filled.append(tensor)
        return unflatten(structure, filled), Cut(wanted, length)

    def difference(self, step: Any, batch: Any, padded: Any, cut: Cut) -> str:
        """Why padding this batch is not exact; empty where it is. Errors of the batch as it is go on to the user."""
        plain = self.measure(step, batch)
        try:
            filled = self.measure(step, padded)
        except (WholestepError, RuntimeError, IndexError) as error:
            return f"a padded batch does not run: {str(error).splitlines()[0]}"
        if not abs(plain.loss - filled.loss) <= TOLERANCE * max(abs(plain.loss), 1e-3):
            return f"the loss of a padded batch is {filled.loss:.6g} instead of {plain.loss:.6g}"
        largest = max((float(t.abs().max()) for t in plain.state.values() if t.numel()), default=0.0)
        for name, tensor in plain.state.items():
            if name not in filled.state or filled.state[name].shape != tensor.shape:
                return f"{name} of a padded batch has another shape"
            apart = float((tensor - filled.state[name]).abs().max()) if tensor.numel() else 0.0
            if not apart <= TOLERANCE * largest:
                return f"{name} of a padded batch is off by {apart:.3g} where values reach {largest:.3g}"
        found = [sequence_dimensions(x, y, cut) for x, y in zip(plain.outputs, filled.outputs, strict=True)]
        for number, (x, y, dimensions) in enumerate(zip(plain.outputs, filled.outputs, found, strict=True)):
            if dimensions is None:
                return f"output {number} has shape {list(y.shape)} instead of {list(x.shape)}, which cannot be cut back"
            if not agree(x, cut_back(y, cut, dimensions)):
                return f"output {number} of a padded batch has other values"
        self.dimensions = tuple(d for d in found if d is not None)
        return ""

    def measure(self, step: Any, batch: Any) -> Measured:
        """What a batch gives in the model's own precision, random draws held still."""
        with keep_random_state(), torch.inference_mode(False):
            batch = first_micro_batch(batch, self.accumulate)
            captured = capture(step.model, step.loss_fn, batch)
            block = captured.function.regions[0].block
            b = StepBuilder(block, phase="backward")
            arguments = dict(zip([s.source for s in captured.slots], block.arguments, strict=True))
            names = [s.source[1] for s in captured.slots if s.kind == "parameter"]
            names = [n for n in names if captured.parameters[n].requires_grad]
            device = next(iter(captured.parameters.values())).device
            grads = gradients(b, captured.loss, [arguments["parameter", n] for n in names], VjpCache(device))
            results = {f"the gradient of {n}": g for n, g in zip(names, grads, strict=True) if g is not None}
            results |= {f"buffer {slot.name}": value for slot, value in captured.changed}
            finish_function(captured.function, [captured.loss, *captured.outputs, *results.values()])
            hold_random_still(captured.function)
            run_pipeline(captured.module, "cse,dce")
            tensors, _, _ = flattened(batch)
            inputs = []
            for slot in captured.slots:
                if slot.kind == "batch":
                    inputs.append(tensors[slot.source[1]])
                elif slot.kind == "random_key":
                    inputs.append(torch.zeros(slot.type.shape, dtype=torch.int64))
                else:
                    table = {"parameter": captured.parameters, "buffer": captured.buffers}
                    inputs.append(table.get(slot.kind, captured.constants)[slot.source[1]].detach())
            loss, *values = Executable(captured.function, device)(inputs)
        outputs, state = values[: len(captured.outputs)], values[len(captured.outputs) :]
        return Measured(float(loss), outputs, dict(zip(results, [v.double() for v in state], strict=True)))


def modes_of(step: Any) -> tuple[bool, ...]:
    """What decides beside the batch whether padding is exact: which layers are in training, which parameters train."""
    roots = [root for root in (step.model, step.loss_fn) if isinstance(root, nn.Module)]
    modes = [m.training for root in roots for m in root.modules()]
    return tuple(modes + [p.requires_grad for root in roots for p in root.parameters()])


def sequence_dimensions(plain: torch.Tensor, padded: torch.Tensor, cut: Cut) -> tuple[int, ...] | None:
    """The dimensions of an output that have grown with the batch; None where it changed in another way."""
    if plain.dim() != padded.dim():
        return None
    grown = [i for i, (x, y) in enumerate(zip(plain.shape, padded.shape, strict=True)) if x != y]
    return tuple(grown) if all((padded.shape[i], plain.shape[i]) == cut[:2] for i in grown) else None


def cut_back(tensor: torch.Tensor, cut: Cut, dimensions: tuple[int, ...]) -> torch.Tensor:
    """An output without what padding added to its sequence."""
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, cut.length)
    return tensor


def agree(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two outputs are the same up to another order of summation."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    largest = x.abs().nan_to_num(0.0, 0.0, 0.0).max() if x.numel() else 0.0
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * float(largest), equal_nan=True)


def hold_random_still(function: Op) -> None:
    """Replaces every random draw by one number, so that dropout keeps everything and shapes may be compared."""
    for op in list(function.regions[0].block):
        if op.name == "step.random":
            assert op.parent is not None
            b = StepBuilder(op.parent, op, op.loc, op.phase)
            op.result.replace_by(b.full(0.999 if op.distribution != "normal" else 0.0, op.type.shape, op.type.element))
            op.erase()


def bucket(length: int) -> int:
    """The bucket of a length: four sizes between a power of two and the next."""
    if length <= SMALLEST:
        return SMALLEST
    stride = max(1, 1 << ((length - 1).bit_length() - 3))
    return -(-length // stride) * stride
