"""Padding of shorter sequences up to a bucket, used only where the model's own masks make it exact.

Whether they do is measured, once per step: loss, gradients and statistics of a batch, padded and not, must agree in
float32 with random draws held still. Otherwise every length gets a program of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..capture.capture import capture
from ..capture.sandbox import keep_random_state
from ..capture.structure import unflatten
from ..dialects.step import StepBuilder
from ..errors import WholestepError
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


Cut = tuple[int, int]


class Padding:
    """Decides for one step whether batches are padded, and pads them."""

    def __init__(self, options: Options):
        self.values: Mapping[str, float] | None = options.pad
        self.accumulate = options.accumulate
        self.exact: bool | None = None
        self.reason = ""

    def fill(self, step: Any, batch: Any) -> tuple[Any, Cut | None]:
        """The batch at the length of its bucket, or as it is where padding would change the result.

        Also gives how outputs are cut back: the padded length and the true one.
        """
        padded, cut = self.padded(batch)
        if cut is None or self.exact is False:
            return batch, None
        if self.exact is None:
            self.reason = self.difference(step, batch, padded)
            self.exact = not self.reason
        return (padded, cut) if self.exact else (batch, None)

    def description(self) -> str:
        """What became of padding, for the report."""
        if self.exact:
            return "shorter sequences are padded to their bucket: checked to be exact on the first one"
        return f"sequences are not padded: {self.reason}" if self.reason else ""

    def padded(self, batch: Any) -> tuple[Any, Cut | None]:
        """The batch filled up along dimension 1; as it is where it has its bucket's length or padding is not known."""
        tensors, names, structure = flattened(batch)
        keys = [name.removeprefix("batch").strip(".[]") for name in names]
        values = self.values
        if values is None:
            values = CONVENTION if "attention_mask" in keys else {}
        lengths = {t.shape[1] for t, key in zip(tensors, keys, strict=True) if key in values and t.dim() > 1}
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
        return unflatten(structure, filled), (wanted, length)

    def difference(self, step: Any, batch: Any, padded: Any) -> str:
        """Why padding this batch is not exact; empty where it is."""
        try:
            (loss, plain), (padded_loss, filled) = (self.measure(step, b) for b in (batch, padded))
        except (WholestepError, RuntimeError, IndexError) as error:
            return f"a padded batch does not run: {str(error).splitlines()[0]}"
        if not abs(loss - padded_loss) <= TOLERANCE * max(abs(loss), 1e-3):
            return f"the loss of a padded batch is {padded_loss:.6g} instead of {loss:.6g}"
        largest = max((float(t.abs().max()) for t in plain.values() if t.numel()), default=0.0)
        for name, tensor in plain.items():
            if name not in filled or filled[name].shape != tensor.shape:
                return f"{name} of a padded batch has another shape"
            apart = float((tensor - filled[name]).abs().max()) if tensor.numel() else 0.0
            if not apart <= TOLERANCE * largest:
                return f"{name} of a padded batch is off by {apart:.3g} where values reach {largest:.3g}"
        return ""

    def measure(self, step: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss, gradients and new statistics of a batch in the model's own precision, random draws held still."""
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
            finish_function(captured.function, [captured.loss, *results.values()])
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
        return float(loss), dict(zip(results, [v.double() for v in values], strict=True))


def cut_back(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """An output without what padding added to its sequence."""
    if cut is None or tensor.dim() < 2 or tensor.shape[1] != cut[0]:
        return tensor
    return tensor[:, : cut[1]]


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
