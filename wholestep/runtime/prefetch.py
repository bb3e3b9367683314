"""`ws.prefetch`: batches of a loader on their way to the device while the step before them still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..capture.structure import flatten, unflatten
from ..errors import InputError
from ..options import is_count


class Prefetch:
    """The batches of a loader, each on the device when it is asked for; may be gone through again and again.

    On a GPU a batch is copied from pinned memory on a stream of its own, `ahead` batches before it is used, and the
    step waits for it on the device. On a CPU batches are handed on as they are.
    """

    def __init__(self, loader: Iterable[Any], device: Any = None, ahead: int = 2):
        if not is_count(ahead):
            raise InputError(f"ahead= counts the batches that are under way, at least 1, not {ahead!r}")
        if not isinstance(loader, Iterable):
            raise InputError(f"prefetch goes through a loader, such as a torch.utils.data.DataLoader, not {loader!r}")
        self.loader, self.ahead = loader, ahead
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(getattr(device, "device", device))
        except (RuntimeError, TypeError):
            raise InputError(
                f'prefetch sends batches to a compiled step, or to a device such as "cuda", not to {device!r}. '
                "Try: ws.prefetch(loader, step) with what ws.compile gave"
            ) from None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            yield from (self._moved(batch) for batch in self.loader)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        under_way: deque[tuple[Any, list[torch.Tensor], torch.cuda.Event]] = deque()
        for batch in self.loader:
            under_way.append(self._sent(batch, self._stream))
            if len(under_way) > self.ahead:
                yield self._arrived(*under_way.popleft())
        while under_way:
            yield self._arrived(*under_way.popleft())

    def _moved(self, batch: Any) -> Any:
        tensors: list[torch.Tensor] = []
        structure = flatten(batch, tensors, [], "batch")
        return unflatten(structure, [t.to(self.device) for t in tensors])

    def _sent(self, batch: Any, stream: torch.cuda.Stream) -> tuple[Any, list[torch.Tensor], torch.cuda.Event]:
        """Starts the copies of a batch."""
        tensors: list[torch.Tensor] = []
        structure = flatten(batch, tensors, [], "batch")
        with torch.cuda.stream(stream):
            pinned = [t if t.is_cuda or t.is_pinned() else t.pin_memory() for t in tensors]
            there = [t.to(self.device, non_blocking=True) for t in pinned]
            event = torch.cuda.Event()
            event.record(stream)
        return structure, there, event

    def _arrived(self, structure: Any, tensors: list[torch.Tensor], event: torch.cuda.Event) -> Any:
        """A batch whose copies the stream of the step waits for."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)
        return unflatten(structure, tensors)


def prefetch(loader: Iterable[Any], device: Any = None, *, ahead: int = 2) -> Prefetch:
    """Goes through a loader with its next batches already on their way to the device.

    device: where to, or the compiled step itself: `for batch in ws.prefetch(loader, step): step(*batch)`; left out, the
        GPU where there is one.
    ahead: how many batches are under way at once. Loaders with pin_memory=True save a copy on the host.
    """
    found = Prefetch(loader, device, ahead)
    if found.device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("prefetch should send batches to a GPU, and PyTorch finds none; give it the step instead")
    return found
