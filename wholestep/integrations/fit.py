"""`ws.fit`: the loop around a step, with a progress line, callbacks and a learning-rate schedule.

Batches are moved to the step's device without waiting for it. Losses stay there and are fetched together every
`log_every` steps, so that between two reports nothing makes the host wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import InputError
from ..runtime.report import movement_of_step
from ..runtime.train_step import TrainStep
from .progress import ProgressLine, progress_line, short

EVENTS = ("on_fit_begin", "on_step_end", "on_epoch_end", "on_fit_end")


@dataclass
class History:
    """What a run of `fit` came to."""

    losses: list[float] = field(default_factory=list)  # one per step
    epochs: int = 0  # those completed
    items: int = 0  # tokens, images or samples trained on
    unit: str = "samples"
    seconds: float = 0.0  # wall time of the whole loop, callbacks included
    bytes_per_step: int | None = (
        None  # what the compiled program reads and writes; None for a step that is not compiled
    )
    peak_memory: int | None = None  # bytes

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        last = f", last loss {self.losses[-1]:.4g}" if self.losses else ""
        return (
            f"{self.steps} steps in {self.seconds:.1f} s, {short(self.items_per_second)} {self.unit}/s"
            f"{last}{_sizes(self.bytes_per_step, self.peak_memory)}"
        )


@dataclass
class FitState:
    """What callbacks see. Set `stop` to end the run after this step."""

    step: Callable[..., Any]
    history: History
    epoch: int = 0
    global_step: int = 0  # steps done in this run
    batch: Any = None
    stop: bool = False
    error: BaseException | None = None  # in on_fit_end: what ended the run, None where it ended by itself
    optimizer: torch.optim.Optimizer | None = None
    _loss: torch.Tensor | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The last step's loss. Asking for it waits for the device."""
        return float("nan") if self._loss is None else self._loss.item()

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer's first group; None where `fit` does not know the optimizer."""
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])


def fit(
    step: Callable[..., Any],
    loader: Iterable[Any],
    epochs: int | None = 1,
    *,
    max_steps: int | None = None,
    callbacks: Sequence[Any] = (),
    scheduler: Any = None,
    scheduler_every: str = "step",
    progress: bool = True,
    log_every: int = 10,
) -> History:
    """Trains: `step` on every batch of `loader`, `epochs` times or for `max_steps` steps, whichever ends first.

    step: a compiled step. A plain function of a batch that trains and returns the loss is taken too, so that one loop
        serves both; batches then stay on the device they come on.
    loader: gives batches as tensors, tuples or mappings, each as the step was compiled for.
    epochs: None repeats the loader until `max_steps`.
    callbacks: objects with any of on_fit_begin, on_step_end, on_epoch_end, on_fit_end, each called with a `FitState`; a
        plain function is called at the end of each step. on_fit_end runs however the run ends.
    scheduler: a torch learning-rate scheduler, stepped each `scheduler_every` ("step" or "epoch").
    progress: shows a line on stderr every `log_every` steps: loss, speed, bytes per step, memory.
    log_every: how often losses are fetched from the device. Only then, and where a callback asks for the loss, does the
        host wait for it.

    An exception or Ctrl-C closes the line, leaves model and optimizer after the last whole step and goes on to you.
    """
    _check(step, epochs, max_steps, scheduler, scheduler_every, log_every)
    if not isinstance(callbacks, Sequence):
        raise InputError(
            f"callbacks is a list of functions or objects with on_step_end and the like, not {callbacks!r}"
        )
    run = _Run(step, scheduler, scheduler_every, [_handlers(c) for c in callbacks], log_every)
    with progress_line(_total(loader, epochs, max_steps), progress) as line:
        try:
            run.call("on_fit_begin")
            run.train(loader, epochs, max_steps, line)
        except BaseException as error:
            run.state.error = error
            raise
        finally:
            run.fetch()
            run.flush()
            run.call("on_fit_end")
    return run.state.history


class _Run:
    """One call of `fit`: where it is, and the losses that are still on the device."""

    def __init__(self, step: Any, scheduler: Any, scheduler_every: str, handlers: list[dict[str, Any]], log_every: int):
        compiled = isinstance(step, TrainStep)
        optimizer = step.optimizer if compiled else getattr(scheduler, "optimizer", None)
        self.state = FitState(step, History(), optimizer=optimizer)
        self.device = step.device if compiled else None
        self.scheduler, self.scheduler_every, self.handlers, self.log_every = (
            scheduler, scheduler_every, handlers, log_every,
        )  # fmt: skip
        self.on_device: list[torch.Tensor] = []
        self.start = time.perf_counter()
        self.shown_at, self.shown_items = self.start, 0

    def train(
        self, loader: Iterable[Any], epochs: int | None, max_steps: int | None, line: ProgressLine | None
    ) -> None:
        state, length = self.state, _length(loader)
        while not state.stop and (epochs is None or state.epoch < epochs):
            before = state.global_step
            for batch in _batches(loader, max_steps, state):
                self.one(batch)
                if state.global_step % self.log_every == 0:
                    self.report(line)
                self.call("on_step_end")
                if state.stop:
                    break
            if state.global_step == before:
                raise InputError(_nothing_came(loader, state.epoch))
            cut = state.stop or state.global_step == max_steps
            if not cut or state.global_step - before == length:
                self.end_epoch(before)
            if cut:
                break
        if state.global_step % self.log_every:
            self.report(line)

    def one(self, batch: Any) -> None:
        """One batch through the step."""
        state = self.state
        state.batch = move(batch, self.device) if self.device is not None else batch
        result = state.step(*state.batch) if isinstance(state.batch, list | tuple) else state.step(state.batch)
        state._loss = _loss_of(state.step, result)
        self.on_device.append(state._loss)
        state.global_step += 1
        count, state.history.unit = items(state.batch)
        state.history.items += count
        if self.scheduler is not None and self.scheduler_every == "step":
            self.scheduler.step()

    def end_epoch(self, steps_before: int) -> None:
        state = self.state
        state.epoch += 1
        state.history.epochs = state.epoch
        if self.scheduler is not None and self.scheduler_every == "epoch":
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.fetch()
                losses = state.history.losses[steps_before:]
                self.scheduler.step(sum(losses) / len(losses))
            else:
                self.scheduler.step()
        self.flush()
        self.call("on_epoch_end")

    def flush(self) -> None:
        """The model with its last update, where that waits for the next forward."""
        if isinstance(self.state.step, TrainStep):
            self.state.step.flush()

    def fetch(self) -> None:
        """Brings the losses of the last steps to the host, all at once."""
        history = self.state.history
        if self.on_device:
            history.losses += torch.stack([t.reshape(()).float() for t in self.on_device]).tolist()
            self.on_device.clear()
        history.seconds = time.perf_counter() - self.start
        history.peak_memory = peak_memory(self.device)
        if history.bytes_per_step is None and isinstance(self.state.step, TrainStep):
            history.bytes_per_step = movement_of_step(self.state.step).ledger.total

    def report(self, line: ProgressLine | None) -> None:
        self.fetch()
        history, now = self.state.history, time.perf_counter()
        speed = (history.items - self.shown_items) / max(now - self.shown_at, 1e-9)
        self.shown_at, self.shown_items = now, history.items
        if line is not None:
            note = f"loss {history.losses[-1]:.4g}  {short(speed)} {history.unit}/s"
            line.show(self.state.global_step, note + _sizes(history.bytes_per_step, history.peak_memory))

    def call(self, event: str) -> None:
        for handlers in self.handlers:
            if event in handlers:
                handlers[event](self.state)


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; copies from pinned memory do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {k: move(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(v, device) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(v, device) for v in batch)
    return batch


def items(batch: Any) -> tuple[int, str]:
    """What a batch counts, by its first tensor: tokens (integers [B, T]), images (floats [N, C, H, W]) or samples."""
    first = next(_tensors(batch), None)
    if first is None or first.dim() == 0:
        return 1, "samples"
    if first.dim() == 2 and not first.is_floating_point() and first.dtype != torch.bool:
        return first.numel(), "tokens"
    if first.dim() == 4 and first.is_floating_point():
        return first.shape[0], "images"
    return first.shape[0], "samples"


def peak_memory(device: torch.device | None) -> int | None:
    """Most bytes in use so far: what torch allocated on a CUDA device, else what the process held of the host's."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # has no getrusage
        return None
    import resource

    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kept if sys.platform == "darwin" else kept * 1024


def _sizes(bytes_per_step: int | None, memory: int | None) -> str:
    moved = f"  {short(bytes_per_step)}B/step" if bytes_per_step is not None else ""
    return moved + (f"  {short(memory)}B memory" if memory is not None else "")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _batches(loader: Iterable[Any], max_steps: int | None, state: FitState) -> Iterator[Any]:
    """The batches of one epoch that `max_steps` leaves room for; none is taken from the loader in vain."""
    iterator = iter(loader)
    while max_steps is None or state.global_step < max_steps:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _loss_of(step: Any, result: Any) -> torch.Tensor:
    loss = step.last.loss if isinstance(step, TrainStep) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InputError(f"a step must return the loss as a tensor of one number, not {_described(loss)}")
    return loss.detach()


def _described(value: Any) -> str:
    shaped = isinstance(value, torch.Tensor)
    return f"a tensor of shape {list(value.shape)}" if shaped else f"a {type(value).__name__}"


def _handlers(callback: Any) -> dict[str, Any]:
    """The events a callback listens to."""
    if isinstance(callback, type):
        raise InputError(f"the callback {callback.__name__} is a class: pass an object of it, {callback.__name__}(...)")
    found = {event: getattr(callback, event) for event in EVENTS if callable(getattr(callback, event, None))}
    if found:
        return found
    if not callable(callback):
        raise InputError(
            f"the callback {callback!r} has none of the methods {', '.join(EVENTS)} and is not a function of the state"
        )
    return {"on_step_end": callback}


def _check(step: Any, epochs: Any, max_steps: Any, scheduler: Any, scheduler_every: str, log_every: Any) -> None:
    if not callable(step):
        raise InputError(f"step must be what ws.compile gives, or a function of a batch, not {type(step).__name__}")
    if epochs is None and max_steps is None:
        raise InputError("epochs and max_steps are both None: say when to stop")
    for name, value in (("epochs", epochs), ("max_steps", max_steps), ("log_every", log_every)):
        if value is None and name != "log_every":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} must be a positive whole number, not {value!r}")
    if scheduler_every not in ("step", "epoch"):
        raise InputError(f'scheduler_every must be "step" or "epoch", not {scheduler_every!r}')
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)):
        raise InputError(f"scheduler must be a torch learning-rate scheduler, not {type(scheduler).__name__}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and scheduler_every == "step":
        raise InputError('ReduceLROnPlateau looks at the loss of an epoch: pass scheduler_every="epoch"')
    if isinstance(step, TrainStep) and getattr(scheduler, "optimizer", step.optimizer) is not step.optimizer:
        raise InputError("the scheduler belongs to another optimizer than the step: build it from the step's optimizer")


def _total(loader: Iterable[Any], epochs: int | None, max_steps: int | None) -> int | None:
    """How many steps there will be, where that can be known."""
    length = _length(loader)
    whole = length * epochs if length is not None and epochs is not None else None
    known = [n for n in (whole, max_steps) if n is not None]
    return min(known) if known else None


def _length(loader: Iterable[Any]) -> int | None:
    """The number of batches; None where the loader does not know."""
    if isinstance(loader, torch.utils.data.DataLoader) and not isinstance(loader.dataset, Sized):
        return None  # its len() asks the dataset
    return len(loader) if isinstance(loader, Sized) else None


def _nothing_came(loader: Iterable[Any], epoch: int) -> str:
    if epoch and iter(loader) is loader:
        return (
            f"the loader gave no batch in epoch {epoch + 1}: an iterator can be read once; "
            "pass a DataLoader or a list of batches"
        )
    return "the loader gave no batch; check its dataset, batch_size and drop_last"
