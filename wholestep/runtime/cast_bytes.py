"""Bytes that casts between float types move in one step: ours, counted on the executable, beside torch.autocast's.

Autocast is counted by running the user's model on fake tensors (types and shapes, no memory, no arithmetic) with a mode
that sees every conversion that PyTorch dispatches. Conversions inside another kernel, and of
single numbers, count on neither side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..backends.absorption import CastBytes
from ..capture.export import Wrapper, calling_convention
from ..capture.sandbox import Attributes, keep_random_state, quiet
from ..capture.structure import flatten
from ..torch_private import FakeTensorMode, TorchDispatchMode, silent_fakes
from .executor import Executable

__all__ = ["CastBytes", "autocast_casts", "program_casts"]


def program_casts(executable: Executable) -> CastBytes:
    """The casts of one step of a compiled program."""
    return executable.casts


class CastCounter(TorchDispatchMode):
    """Sees every ATen call and counts those that convert one float type to another."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.note(args[0], out)
        elif func is torch.ops.aten.copy_.default:
            self.note(args[1], args[0])
        return out

    def note(self, source: torch.Tensor, target: torch.Tensor) -> None:
        floats = source.is_floating_point() and target.is_floating_point()
        if floats and source.dtype is not target.dtype and source.dim():
            self.bytes += source.numel() * source.element_size() + target.numel() * target.element_size()
            self.count += 1


def autocast_casts(model: nn.Module, loss_fn: Any, batch: Any, dtype: torch.dtype) -> CastBytes | str:
    """What eager forward and backward of this batch would cast under torch.autocast; a reason where it cannot run.

    Nothing of the user's changes: parameters and buffers are replaced by fakes while the model runs.
    """
    tensors: list[torch.Tensor] = []
    structure = flatten(batch, tensors, [], "batch")
    notes: dict[str, Any] = {}
    wrapper = Wrapper(model, loss_fn, calling_convention(model, loss_fn, batch), structure, notes)
    device = next((p.device.type for p in wrapper.parameters()), "cpu")
    attributes = Attributes(("", model), ("loss_fn", loss_fn))
    counter, mode = CastCounter(), FakeTensorMode()
    try:
        with torch.inference_mode(False), torch.enable_grad(), keep_random_state(), quiet(), silent_fakes():
            state = {n: mode.from_tensor(t) for n, t in (*wrapper.named_parameters(), *wrapper.named_buffers())}
            inputs = tuple(mode.from_tensor(t.detach()) for t in tensors)
            with mode, counter:
                with torch.autocast(device, dtype):
                    outputs = torch.func.functional_call(wrapper, state, inputs)
                leaves = [t for t in state.values() if t.requires_grad]
                torch.autograd.grad(outputs[notes["loss"]], leaves, allow_unused=True)
    except Exception as error:  # whatever it is, it is the report's line: the step itself is not concerned
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    finally:
        attributes.restore()
    return CastBytes(counter.bytes, 0, counter.count)
