"""State that a step keeps beside the model and the optimizer: random counters, low-precision copies, averages, scale.

Copies follow the parameters: one that was written by anybody else since the last step is made again. Autograd's version
counters tell; eager steps of the optimizer and writes through `.data`, which they do not count, are noticed otherwise.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ..backends.kernels import Spec
from ..capture.slots import Slot
from ..dialects.step import torch_dtype
from ..errors import InputError, LossScaleError, StaleCopyError
from ..ir.types import F16
from ..options import Options
from ..plan.plan import aligned
from ..torch_private import version_of
from ..training.precision import parse_precision
from .bound import BoundPlan
from .calls import Call
from .record import Record, Subjects, record

KINDS = ("copy", "ema", "scaler")
#: copies begin at multiples of so many bytes, as all that a GPU's allocator hands out
APART = 512
#: how many elements of a parameter are looked at between steps
SAMPLES = 16
#: a loss scale this far below 1 (or below the first scale) has collapsed: no scale makes the gradients finite
COLLAPSED = 2.0**-10
STALE = (
    "a parameter was changed through .data, which autograd does not count, so a step has used its old low-precision "
    "copy; call step.refresh() after such changes, or change it under torch.no_grad()"
)


class OwnState:
    """The tensors and counters of one step, by the source of their slots."""

    def __init__(self, options: Options):
        self.options = options
        self.seed = torch.initial_seed() & 0x7FFFFFFFFFFFFFFF
        #: steps so far, where C++ counts them too, and the seconds that each took on the host
        self.steps, self.durations = ctypes.c_int64(), list[float]()
        #: who has it may step, and look at what steps change
        self.lock = threading.RLock()
        self.tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self.averaged = 0
        self._versions: dict[str, tuple[int, int]] = {}
        self._scale_news, self._change_news = News(), News()
        #: a few elements of every copied parameter, and what they were after the last step
        self._places: list[int] = []
        self._samples: list[torch.Tensor] = []
        self._sampled: torch.Tensor | None = None
        #: the same inside a CUDA graph
        self.watched: Watch | None = None
        #: how often the copied parameters were written by the end of the last planned step; None: copies may be old
        self.counted: Record | None = None
        self._copied_of: list[Slot] | None = None
        #: the parameters of the program used last that have a copy
        self.copied_parameters: list[torch.Tensor] = []
        #: whether a copy was made from its parameter since a program was last bound
        self._made_again = False

    @property
    def counter(self) -> int:
        """Steps so far."""
        return self.steps.value

    @counter.setter
    def counter(self, steps: int) -> None:
        self.steps.value = steps

    # ---- what a program reads ----------------------------------------------------------------------------------------

    def key(self) -> torch.Tensor:
        """Seed, step and micro-batch: always on the host, where reading it waits for nothing."""
        return torch.tensor([self.seed, self.counter, 0], dtype=torch.int64)

    def ema_weight(self) -> float:
        """The share of the new parameter in its average: all of it on the first step, as torch's AveragedModel."""
        assert self.options.ema is not None
        return 1 - self.options.ema if self.averaged else 1.0

    def fetch(
        self,
        slot: Slot,
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """The tensor of a slot, made where it is not there yet: with these strides, else as its parameter lies."""
        found = self.tensors.get(slot.source)
        dtype = torch_dtype(slot.type.element)
        if slot.kind == "scaler":
            if found is None or found.device != device:
                start = self.options.loss_scale.init_scale if slot.source[1] == "scale" else 0
                found = torch.full((), start, dtype=dtype, device=device) if found is None else found.to(device)
                self.tensors[slot.source] = found
            return found
        fqn = slot.source[1]
        parameter = parameters[fqn].detach()
        if found is None or found.dtype != dtype or found.shape != parameter.shape or found.device != device:
            laid = tuple(torch.empty_like(parameter).stride()) if strides is None else strides
            found = torch.empty_strided(parameter.shape, laid, dtype=dtype, device=parameter.device).copy_(parameter)
            self.tensors[slot.source] = found
            self._made_again |= slot.kind == "copy"
        elif slot.kind == "copy" and self._versions.get(fqn) != mark(parameters[fqn]):
            found.copy_(parameter)
            self._made_again = True
        if slot.kind == "copy":
            self._versions[fqn] = mark(parameters[fqn])
        return found

    def make_room(
        self,
        slots: list[Slot],
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
        strides: Mapping[tuple[Any, ...], tuple[int, ...]],
    ) -> None:
        """Memory for all copies that are not there yet, in one piece: asked for one by one, the allocator of a GPU
        hands out up to a megabyte more for each."""
        specs: dict[tuple[Any, ...], Spec] = {}
        for slot in slots:
            if slot.kind == "copy" and slot.source not in self.tensors:
                parameter = parameters[slot.source[1]]
                laid = strides.get(slot.source) or tuple(torch.empty_like(parameter).stride())
                specs[slot.source] = Spec(tuple(parameter.shape), laid, torch_dtype(slot.type.element))
        sizes = [aligned(spec.bytes, APART) for spec in specs.values()]
        room = torch.empty(sum(sizes), dtype=torch.uint8, device=device).untyped_storage()
        for (source, spec), end in zip(specs.items(), itertools.accumulate(sizes), strict=True):
            start = (end - aligned(spec.bytes, APART)) // spec.dtype.itemsize
            part = torch.empty(0, dtype=spec.dtype, device=device).set_(room, start, spec.shape, spec.strides)
            self.tensors[source] = part
            self._versions.pop(source[1], None)  # `fetch` fills it

    def follow(self, slots: list[Slot], parameters: Mapping[str, torch.Tensor]) -> None:
        """After the step has written parameters and their copies: they agree."""
        copied = [slot.source[1] for slot in slots if slot.kind == "copy"]
        for fqn in copied:
            self._versions[fqn] = mark(parameters[fqn])
        if copied:
            places = [parameters[fqn].data_ptr() for fqn in copied]
            if places != self._places:
                self._places, self._samples = places, [sample(parameters[fqn]) for fqn in copied]
            self._sampled = bits(torch.cat(self._samples))

    def follow_parameters(
        self, slots: list[Slot], parameters: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        """Makes copies again whose parameters somebody else has written since the last planned step."""
        copied = self._copied(slots, parameters)
        if not copied:
            return
        if self.counted is not None and self.counted.same():
            return
        for slot in slots:
            if slot.kind == "copy":
                self.fetch(slot, parameters, device)
        self._count(copied)
        if self.watched is not None:
            self.watched.reset()

    def watch(self, slots: list[Slot], parameters: Mapping[str, torch.Tensor], bound: BoundPlan) -> None:
        """Puts the look at a few elements of each copied parameter into a step that runs as a CUDA graph."""
        copied = self._copied(slots, parameters)
        if not copied or bound.device.type != "cuda":
            self.watched = None
            return
        places = [p.data_ptr() for p in copied]
        if self.watched is None or self.watched.places != places:  # programs that take turns look at the same elements
            self.watched = Watch(copied)
        elif self._made_again:  # a checkpoint was loaded, say: what was there before says nothing
            self.watched.reset()
        self._made_again = False
        bound.around(self.watched.head, self.watched.tail)

    def after_step(self, slots: list[Slot], parameters: Mapping[str, torch.Tensor], replayed: bool = False) -> None:
        """After a planned step has written parameters and their copies: they agree. A replayed graph is not counted."""
        if self.watched is None:
            self.follow(slots, parameters)
        elif replayed and self.counted is not None:
            return
        self._count(self._copied(slots, parameters))

    def _count(self, copied: list[torch.Tensor]) -> None:
        """Copies agree with their parameters now."""
        if self.counted is None:
            self.counted = record(Subjects(counted=copied))
        else:
            self.counted.keep()

    def _copied(self, slots: list[Slot], parameters: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that have a copy; asked for on every step."""
        if self._copied_of is not slots:
            self._copied_of, self.counted = slots, None
            self.copied_parameters = [parameters[slot.source[1]] for slot in slots if slot.kind == "copy"]
        return self.copied_parameters

    def average_the_rest(self, slots: list[Slot], parameters: Mapping[str, torch.Tensor]) -> None:
        """Averages whose parameters the program no longer updates (frozen layers) go on towards their value."""
        done = {slot.source for slot in slots if slot.kind == "ema"}
        for source, average in self.tensors.items():
            value = parameters.get(source[1]) if source[0] == "ema" and source not in done else None
            if value is not None and (value.shape, value.dtype) == (average.shape, average.dtype):
                self.tensors[source] = average.to(value.device).lerp_(value.detach(), self.ema_weight())

    def notice_changes(self) -> None:
        """Looks at a few elements of each copied parameter for writes that no counter has seen (`p.data.mul_(2)`).

        On the host the copies are then made again. On a GPU the answer is read when it has arrived, without waiting,
        and is an error by then.
        """
        if self.watched is not None:
            if self.watched.news():
                self.watched.settle()
                self.refresh()
                raise StaleCopyError(STALE)
            return
        if self._sampled is None or not self._versions:
            return
        changed = (bits(torch.cat(self._samples)) != self._sampled).any()
        for found in self._change_news.exchange(changed):
            if changed.device.type == "cpu" and found:
                self.refresh()
            elif found:
                self.refresh()
                raise StaleCopyError(STALE)

    def refresh(self) -> None:
        """Makes every low-precision copy again before the next step."""
        self._versions.clear()
        self.counted = self._sampled = None
        self._change_news = News()

    # ---- the loss scale ----------------------------------------------------------------------------------------------

    def watch_scale(self) -> None:
        """Raises once the loss scale has collapsed. On a GPU the news is read when it arrives, without waiting."""
        scale = self.tensors.get(("scaler", "scale"))
        if scale is not None:
            for value in self._scale_news.exchange(scale):
                self._judge(value)

    def _judge(self, scale: float) -> None:
        first = self.options.loss_scale.init_scale
        if not scale >= COLLAPSED * min(1.0, first):
            raise LossScaleError(
                f"the loss scale has collapsed from {first:g} to {scale:g}: the gradients are not finite at any scale, "
                "so every update is skipped.\nTry: look for NaN in the batch or the loss, lower the learning rate, "
                'keep the layer that overflows in fp32 (precision={"default": "fp16", "layer": "fp32"}), or use bf16'
            )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Random counters, and the loss scale and averages where the step has them."""
        found: dict[str, Any] = {"random": {"seed": self.seed, "counter": self.counter}}
        scale = self.tensors.get(("scaler", "scale"))
        if scale is not None:  # the keys of torch.amp.GradScaler.state_dict()
            how, tracker = self.options.loss_scale, self.tensors["scaler", "growth_tracker"]
            found["scaler"] = {
                "scale": float(scale),
                "growth_factor": how.growth_factor,
                "backoff_factor": how.backoff_factor,
                "growth_interval": how.growth_interval,
                "_growth_tracker": int(tracker),
            }
        if self.options.ema is not None:
            averages = {source[1]: t.clone() for source, t in self.tensors.items() if source[0] == "ema"}
            found["ema"] = {"decay": self.options.ema, "updates": self.averaged, "parameters": averages}
        return found

    def check(self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        """Raises where a state dict is not of this step; changes nothing."""
        random, scaler, ema = (state.get(k) for k in ("random", "scaler", "ema"))
        if random is not None and not has_numbers(random, "seed", "counter"):
            raise InputError("the random state of the checkpoint is not a seed and a counter. Nothing was loaded")
        if scaler and not is_scale(scaler):  # that of a GradScaler that is turned off is empty
            raise InputError("the loss scale of the checkpoint is not one of torch.amp.GradScaler. Nothing was loaded")
        if ema is None:
            return
        averages = ema.get("parameters") if isinstance(ema, Mapping) else None
        if not isinstance(averages, Mapping) or not has_numbers(ema, "updates"):
            raise InputError("the averages of the checkpoint are not those of a step. Nothing was loaded")
        for fqn, tensor in averages.items():
            if not isinstance(tensor, torch.Tensor):
                raise InputError(f"the average of {fqn} in the checkpoint is no tensor. Nothing was loaded")
            if fqn not in parameters or parameters[fqn].shape != tensor.shape:
                have = f"{list(parameters[fqn].shape)} in this model" if fqn in parameters else "not in this model"
                raise InputError(
                    f"the average of {fqn} has shape {list(tensor.shape)}, and {fqn} is {have}. Nothing was loaded"
                )

    def load(self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `state_dict` gave (and `check` accepted)."""
        random = state.get("random")
        if random is not None:
            self.seed, self.counter = int(random["seed"]), int(random["counter"])
        device = next(iter(parameters.values())).device
        scaler = state.get("scaler")
        if scaler and parse_precision(self.options.precision).low is F16:
            values = (
                ("scale", scaler["scale"], torch.float32),
                ("growth_tracker", scaler["_growth_tracker"], torch.int64),
            )
            for name, value, dtype in values:
                self.tensors["scaler", name] = torch.full((), value, dtype=dtype, device=device)
        if self.options.ema is not None:  # without averages in the checkpoint they start anew
            ema = state.get("ema") or {"updates": 0, "parameters": {}}
            self.averaged = int(ema["updates"])
            self.tensors = {source: t for source, t in self.tensors.items() if source[0] != "ema"}
            for fqn, tensor in ema["parameters"].items():
                self.tensors["ema", fqn] = tensor.to(parameters[fqn].device, parameters[fqn].dtype, copy=True)
        self.refresh()


class Watch:
    """Looks, inside a CUDA graph, whether a few elements of each parameter are still what the last step left there.

    The answer arrives in pinned memory by itself; the host reads whatever has arrived.
    """

    def __init__(self, parameters: list[torch.Tensor]):
        self.places = [p.data_ptr() for p in parameters]
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.dtype, []).append(sample(parameter))
        self.samples = list(groups.values())
        self.before = [torch.cat(samples) for samples in self.samples]
        self.now = [torch.empty_like(t) for t in self.before]
        device = parameters[0].device
        differ = [torch.zeros(t.shape, dtype=torch.bool, device=device) for t in self.before]
        found = [torch.zeros((), dtype=torch.bool, device=device) for _ in self.before]
        self.changed = torch.zeros(len(found), dtype=torch.bool, device=device)
        self.arrived = torch.zeros(len(found), dtype=torch.bool, pin_memory=True)
        self._arrived = memoryview(self.arrived.numpy())
        self.head: list[Call] = []
        self.tail: list[Call] = []
        for i, samples in enumerate(self.samples):
            self.head.append((torch.cat, (samples,), {"out": self.now[i]}))
            self.head.append((torch.ne, (bits(self.now[i]), bits(self.before[i])), {"out": differ[i]}))
            self.head.append((torch.any, (differ[i],), {"out": found[i]}))
            self.head.append((self.changed[i].copy_, (found[i],), {}))
            self.tail.append((torch.cat, (samples,), {"out": self.before[i]}))
        self.head.append((self.arrived.copy_, (self.changed,), {"non_blocking": True}))

    def news(self) -> bool:
        return any(self._arrived)

    def settle(self) -> None:
        """Forgets what was found, once all that is under way has arrived."""
        torch.cuda.synchronize(self.changed.device)
        self.arrived.zero_()

    def reset(self) -> None:
        """The parameters were written by somebody who said so."""
        for samples, before in zip(self.samples, self.before, strict=True):
            torch.cat(samples, out=before)


class News:
    """A number of the device on its way to the host: given away now, read once it has arrived, never waited for."""

    def __init__(self) -> None:
        self._under_way: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def exchange(self, value: torch.Tensor) -> list[Any]:
        """Sends a number on its way unless one still is; gives those that have arrived. On the host that is at once."""
        if value.device.type == "cpu":
            return [value.item()]
        arrived = []
        if self._under_way is not None:
            held, event = self._under_way
            if not event.query():
                return []
            arrived.append(held.item())
        held = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        held.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way = (held, event)
        return arrived


class EagerStepNotice:
    """A hook on the user's optimizer: an eager step changes parameters, and fused kernels do so uncounted."""

    of_wholestep = True

    def __init__(self, own: OwnState):
        self._own = weakref.ref(own)

    def __call__(self, *_: Any) -> None:
        own = self._own()
        if own is not None:
            own.refresh()


def sample(parameter: torch.Tensor) -> torch.Tensor:
    """A few elements from the middle of a parameter, as a view of it; none of one that is scattered in memory."""
    channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    count = parameter.numel() if parameter.is_contiguous() or channels_last else 0
    start = parameter.storage_offset() + max(0, count // 2 - SAMPLES // 2)
    return parameter.detach().as_strided((min(SAMPLES, count),), (1,), start)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, so that NaN equals itself."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int64)


def has_numbers(found: Any, *keys: str) -> bool:
    """Whether a mapping holds a number under each key."""
    return isinstance(found, Mapping) and all(isinstance(found.get(k), int | float) for k in keys)


def is_scale(found: Any) -> bool:
    """Whether this is the state of a `torch.amp.GradScaler`."""
    return has_numbers(found, "scale", "_growth_tracker") and 0 < found["scale"] < math.inf


def mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Which tensor, written how often."""
    return parameter.data_ptr(), version_of(parameter)
