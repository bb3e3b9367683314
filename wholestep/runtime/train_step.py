"""`TrainStep`: the compiled step as the user holds it.

Parameters, buffers and optimizer state stay in the user's own tensors. A step computes every new value first and then
writes them all at once, so an exception or Ctrl-C finds the model at a step border.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..capture.sandbox import keep_random_state
from ..capture.slots import Slot
from ..capture.structure import differences, flatten, unflatten
from ..errors import InputError
from ..ir.core import Op
from ..torch_private import mark_optimizer_called
from ..training.build import Program, sizes
from ..training.optimizer_plan import OptimizerPlan
from .executor import Executable
from .report import Report
from .verification import compare_with_eager


class Compiled:
    """One compiled program with what it was compiled for."""

    def __init__(
        self, program: Program, plan: OptimizerPlan, executable: Executable, key: Any, seconds: dict[str, float]
    ):
        self.program, self.plan, self.executable, self.key, self.seconds = program, plan, executable, key, seconds
        self.batch_slots = [s for s in program.slots if s.kind == "batch"]
        self.batch_types = {s.source[1]: s for s in self.batch_slots}
        #: where each buffer lives: eager code may put another tensor there (`self.buffer = self.buffer + 1`)
        self.buffers: dict[str, tuple[dict[str, Any], str]] = {}


class TrainStep:
    """A whole training step as one call: `loss = step(*batch)`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        example_batch: Any,
        recompile: Callable[[TrainStep], Compiled],
        key_of: Callable[[TrainStep, OptimizerPlan], Any],
        options: dict[str, Any],
    ):
        self.model, self.loss_fn, self.optimizer, self.options = model, loss_fn, optimizer, options
        self.example_batch = example_batch
        self._recompile, self._key_of = recompile, key_of
        self._seed, self._counter = torch.initial_seed() & 0x7FFFFFFFFFFFFFFF, 0
        self._lock = threading.RLock()
        self._numbers: dict[Any, tuple[float, torch.Tensor]] = {}
        self._durations: list[float] = []
        self.compilations = 0
        self.verified: bool | None = None
        self.last = SimpleNamespace(loss=None, outputs=None, grad_norm=None)
        self.plan: OptimizerPlan | None = None
        self._compiled = self._compile()

    # ---- what a user asks --------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Runs one training step: forward, loss, backward, clipping, update. Returns what the loss function returns."""
        with self._lock, torch.inference_mode(False):
            start = time.perf_counter()
            refuse_autocast("called")
            given = self._batch(batch, named)
            compiled = self._current()
            tensors = self._check(compiled, given)
            result = self._run(compiled, tensors, given)
            self._durations.append(time.perf_counter() - start)
            return result

    def program(self) -> Op:
        """The one program of the step; `str()` of it is MLIR text."""
        return self._compiled.program.module

    def report(self) -> Report:
        """What was compiled and how it runs."""
        program = self._compiled.program
        return Report(
            seconds=dict(self._compiled.seconds),
            ops=sizes(program.function),
            parameters=len(program.updated),
            untouched=list(program.untouched),
            opaque=dict(program.captured.opaque),
            traced=dict(program.vjps.traced),
            compilations=self.compilations,
            step_seconds=list(self._durations),
            optimizer=type(self.optimizer).__name__,
            verified=self.verified,
        )

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and random state, as plain PyTorch state dicts."""
        with self._lock:
            return {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": {"seed": self._seed, "counter": self._counter},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        with self._lock:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self._seed, self._counter = int(state["random"]["seed"]), int(state["random"]["counter"])

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {phase}" for phase, n in sizes(self._compiled.program.function).items() if n)
        return f"<TrainStep of {type(self.model).__name__}: {counts} ops>"

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def _compile(self) -> Compiled:
        refuse_autocast("compiled")
        with keep_random_state(), torch.inference_mode(False):
            compiled = self._recompile(self)
        compiled.buffers = buffer_homes(self.model, self.loss_fn)
        self.plan = compiled.plan
        self.compilations += 1
        return compiled

    def _current(self) -> Compiled:
        """The compiled program, built again if what it depends on (frozen layers, modes, groups) has changed."""
        if self._key_of(self, self._compiled.plan) != self._compiled.key:
            self._compiled = self._compile()
        return self._compiled

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _batch(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The batch in the form it was compiled with: keyword batches may come as one mapping or as keywords."""
        if isinstance(self.example_batch, Mapping):
            if len(batch) == 1 and not named and isinstance(batch[0], Mapping):
                named = dict(batch[0])
            elif batch:
                raise InputError(
                    f"the step was compiled for a keyword batch {list(self.example_batch)}: call step(**batch)"
                )
            missing = [k for k in self.example_batch if k not in named]
            extra = [k for k in named if k not in self.example_batch]
            if missing or extra:
                raise InputError(
                    f"the batch differs from the one the step was compiled for: missing {missing}, unexpected {extra}"
                )
            return {k: named[k] for k in self.example_batch}
        if named:
            raise InputError(
                f"the step was compiled for {len(self.example_batch)} positional tensors, not keywords {list(named)}"
            )
        parts = len(self.example_batch)
        if len(batch) == 1 != parts and isinstance(batch[0], list | tuple) and len(batch[0]) == parts:
            raise InputError(f"the step takes the {parts} parts of a batch one by one: call step(*batch)")
        return tuple(batch)

    def _check(self, compiled: Compiled, batch: Any) -> list[torch.Tensor]:
        """The tensors of a batch, checked against what the program was compiled for."""
        tensors: list[torch.Tensor] = []
        names: list[str] = []
        structure = flatten(batch, tensors, names, "batch")
        exported = compiled.program.captured.exported
        found = list(differences(exported.batch_structure, structure))
        if found:
            raise InputError(
                "the batch differs from the one the step was compiled for: "
                + "; ".join(found)
                + ".\nTry: pass batches of one structure, or compile another step for this one"
            )
        device = compiled.executable.device
        for index, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
            slot = compiled.batch_types.get(index)
            if slot is None:
                continue
            shape = tuple(tensor.shape)
            if shape != slot.type.shape:
                raise InputError(shape_message(name, slot.type.shape, shape))
            if tensor.dtype != self._dtype(slot):
                raise InputError(
                    f"{name} is {tensor.dtype} but the step was compiled for {self._dtype(slot)}; "
                    f"convert it with .to({self._dtype(slot)})"
                )
            if tensor.device != device:
                raise InputError(
                    f"{name} is on {tensor.device} but the model is on {device}; move it with .to({device})"
                )
        return tensors

    @staticmethod
    def _dtype(slot: Slot) -> torch.dtype:
        from ..dialects.step import torch_dtype

        return torch_dtype(slot.type.element)

    def _run(self, compiled: Compiled, batch: list[torch.Tensor], given: Any) -> Any:
        program = compiled.program
        created: dict[str, dict[str, Any]] = {}
        inputs = [self._fetch(slot, compiled, batch, created) for slot in program.slots]
        outputs = compiled.executable([t.detach() for t in inputs])
        if self.options["verify"] and self.verified is None:
            compare_with_eager(
                program, self.model, self.loss_fn, self.optimizer, given, self.options["clip_norm"], outputs
            )
            self.verified = True
        user = [v for v, r in zip(outputs, program.results, strict=True) if r.kind in ("loss", "output")]
        norm = [v for v, r in zip(outputs, program.results, strict=True) if r.kind == "grad_norm"]
        lasting = storages([*inputs, *(t for _, t in compiled.executable.fixed if isinstance(t, torch.Tensor))])
        user = [t.clone() if storage(t) in lasting else t for t in user]  # before the parameters change
        exported = program.captured.exported
        result = unflatten(exported.output_structure, user)
        self._commit(compiled, inputs, outputs, created)
        self.last = SimpleNamespace(loss=user[exported.loss_index], outputs=result, grad_norm=norm[0] if norm else None)
        return result

    def _fetch(
        self, slot: Slot, compiled: Compiled, batch: list[torch.Tensor], created: dict[str, Any]
    ) -> torch.Tensor:
        """The tensor an argument of the program takes now."""
        kind, source, captured = slot.kind, slot.source, compiled.program.captured
        if kind == "parameter":
            return captured.parameters[source[1]]
        if kind == "buffer":
            table, key = compiled.buffers[source[1]]
            return table[key]
        if kind == "batch":
            return batch[source[1]]
        if kind == "constant":
            return captured.constants[source[1]]
        if kind == "random_key":
            return torch.tensor([self._seed, self._counter], dtype=torch.int64, device=compiled.executable.device)
        if kind == "optimizer_state":
            _, fqn, key = source[:3]
            value = self.optimizer.state.get(captured.parameters[fqn], {}).get(key)
            if value is None:
                if fqn not in created:
                    created[fqn] = compiled.plan.initialise(fqn)
                value = created[fqn].get(key)
            if value is not None:
                return self._as_tensor(slot, value)
        return self._as_tensor(slot, compiled.plan.read(slot))

    def _as_tensor(self, slot: Slot, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value if value.dtype == self._dtype(slot) else value.to(self._dtype(slot))
        known = self._numbers.get(slot.source)
        if known is None or known[0] != value:
            known = (value, torch.tensor(value, dtype=self._dtype(slot)))
            self._numbers[slot.source] = known
        return known[1]

    def _commit(
        self, compiled: Compiled, inputs: list[torch.Tensor], outputs: list[Any], created: dict[str, Any]
    ) -> None:
        """Writes every new value into the user's tensors; nothing interrupts it half-way."""
        place = {slot.source: tensor for slot, tensor in zip(compiled.program.slots, inputs, strict=True)}
        writes = [
            (r.slot, value) for r, value in zip(compiled.program.results, outputs, strict=True) if r.slot is not None
        ]
        written = storages([place[slot.source] for slot, _ in writes])
        writes = [  # a new value that is a piece of state itself (two buffers that swap) is taken out before it changes
            (slot, value.clone() if storage(value) in written else value) for slot, value in writes
        ]
        with uninterrupted(), torch.no_grad():
            for fqn, state in created.items():
                if state:
                    self.optimizer.state[compiled.program.captured.parameters[fqn]].update(state)
            for slot, value in writes:
                if slot.kind == "optimizer_state":
                    self._write_state(slot, compiled, value)
                else:
                    place[slot.source].copy_(value)
            compiled.plan.finish(compiled.program.updated)
            mark_optimizer_called(self.optimizer)
            self._counter += 1

    def _write_state(self, slot: Slot, compiled: Compiled, value: torch.Tensor) -> None:
        """New optimizer state into the user's tensor, or in place of the user's number."""
        _, fqn, key = slot.source[:3]
        state = self.optimizer.state[compiled.program.captured.parameters[fqn]]
        if isinstance(state[key], torch.Tensor):
            state[key].copy_(value)
        else:
            state[key] = type(state[key])(value.item())


def storage(tensor: torch.Tensor) -> int:
    """The memory behind a tensor."""
    return tensor.untyped_storage().data_ptr()


def storages(tensors: list[torch.Tensor]) -> set[int]:
    return {storage(t) for t in tensors if t.numel()}


def buffer_homes(model: nn.Module, loss_fn: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """The module table and key of each buffer, by the name the program uses."""
    homes: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, root in (("", model), ("loss_fn", loss_fn)):
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            for key in module._buffers:
                homes.setdefault(".".join(part for part in (prefix, path, key) if part), (module._buffers, key))
    return homes


def refuse_autocast(what: str) -> None:
    """Autocast outside a step would change its arithmetic behind its back."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise InputError(
                f"torch.autocast is on where the step is {what}; it does not reach into a compiled step: leave the "
                "`with torch.autocast(...)` block, or convert the model with model.to(torch.bfloat16)"
            )


def shape_message(name: str, want: tuple[int, ...], have: tuple[int, ...]) -> str:
    """Which dimension changed and what to do."""
    if len(want) != len(have):
        return f"{name} has {len(have)} dimensions {list(have)} but the step was compiled for {len(want)}: {list(want)}"
    where = ", ".join(
        f"dimension {i} is {h} instead of {w}" for i, (w, h) in enumerate(zip(want, have, strict=True)) if w != h
    )
    return (
        f"{name} has shape {list(have)} but the step was compiled for {list(want)}: {where}.\n"
        "Try: drop or pad the smaller batch (DataLoader(drop_last=True)), or compile another step for this shape"
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds signals with Python handlers (Ctrl-C, alarms) back until the block is done; other threads get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}
    for number in map(int, signal.valid_signals()):
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            handlers[number] = handler

    def hold(number: int, frame: Any) -> None:
        received.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in received:
            handlers[number](number, frame)
