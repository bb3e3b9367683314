"""Peak memory of training steps: the allocator's on a GPU, the process's own on a CPU.

Memory that CUDA graphs hold is not seen by the allocator's peak while they replay: what is still reserved when all that
can be given back has been given back counts too.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

from .contenders import Trainer
from .workload import Batch, Workload

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """The most memory in use between `start` and `stop`; on a GPU in steps alone, each between `begin` and `end`."""

    def __init__(self, workload: Workload, trainer: Trainer, batch: Batch, device: str):
        self.device, self.workload, self.trainer, self.batch = device, workload, trainer, batch
        self.bytes = 0
        #: the allocator's own peak: what CUDA graphs hold and no tensor has is not in it
        self.allocated = 0
        #: the same as it was asked for: the allocator hands out up to 1 MB more where it would be left over
        self.requested = 0
        self.resting = 0

    def start(self) -> None:
        release(self.device)
        if self.device != "cuda" and STATUS.exists():
            RESET.write_text("5")  # forgets the peak of resident memory
            self.resting = resident("VmRSS")

    def begin(self) -> None:
        """A step begins: how its batch was made is no part of its peak."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        if self.device == "cuda":
            self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
            self.requested = max(self.requested, torch.cuda.memory_stats()["requested_bytes.all.peak"])

    def stop(self) -> None:
        if self.device == "cuda":
            release(self.device)
            self.bytes = max(self.bytes, self.allocated, torch.cuda.memory_reserved())
        elif STATUS.exists():
            risen = max(0, resident("VmHWM") - self.resting)
            self.bytes = max(self.bytes, self.lasting() + risen)

    def lasting(self) -> int:
        """On a CPU, what is there between steps: our plan's memory, or the tensors that PyTorch keeps."""
        if self.trainer.whole is not None:
            return self.trainer.whole.plan().peak
        model = self.workload.model
        gradients = [p.grad for p in model.parameters()]
        tensors = [*model.parameters(), *model.buffers(), *gradients, *self.trainer.states(), *self.batch]
        return size_of(tensors)


def size_of(tensors: list[Any]) -> int:
    """Bytes of the tensors in a list; a storage that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}
    return sum(storages.values())


def resident(field: str) -> int:
    """Bytes of a line of the process's status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def release(device: str) -> None:
    """Gives back memory that nothing holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    elif STATUS.exists():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent where the C library is not glibc
        if trim is not None:
            trim(0)
