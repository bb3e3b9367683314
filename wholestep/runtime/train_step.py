"""`TrainStep`: the compiled step as the user holds it.

Parameters, buffers and optimizer state stay in the user's own tensors. A step computes every new value first and then
writes them all at once, so an exception or Ctrl-C finds the model at a step border.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import nn

from ..capture.capture import named_state
from ..capture.sandbox import keep_random_state
from ..capture.slots import Slot
from ..capture.structure import unflatten
from ..dialects.step import torch_dtype
from ..errors import InputError, WholestepError
from ..ir.core import Op
from ..options import Options
from ..plan import Plan, plan_function
from ..torch_private import foreach_copy, mark_optimizer_called
from ..training.build import Program, sizes
from ..training.optimizer_plan import OptimizerPlan
from ..transforms.opportunity import Opportunity, opportunities
from . import own_state
from .batches import as_compiled, check_structure, check_tensor, flattened, shape_message, signature
from .checkpoint import check_checkpoint
from .executor import Executable
from .own_state import EagerStepNotice, OwnState
from .padding import Cut, Padding, cut_back
from .report import Report, report_of
from .saved import write_step
from .verification import compare_with_eager

SIGNALS = tuple(map(int, signal.valid_signals()))


class Compiled:
    """One compiled program with what it was compiled for."""

    def __init__(
        self,
        program: Program,
        plan: OptimizerPlan,
        executable: Executable,
        key: Any,
        seconds: dict[str, float],
        recipe: Sequence[str] = (),
    ):
        self.program, self.plan, self.executable, self.key, self.seconds = program, plan, executable, key, seconds
        #: the transformations that were applied, by their keys
        self.recipe = list(recipe)
        self.batch_slots = [s for s in program.slots if s.kind == "batch"]
        #: whether the program may hold an update back, so that counters live on its device
        self.skips = any(s.kind == "scaler" for s in program.slots)
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
        recompile: Callable[[TrainStep, Any], Compiled],
        key_of: Callable[[TrainStep, OptimizerPlan], Any],
        options: Options,
        compile_now: bool = True,
    ):
        self.model, self.loss_fn, self.optimizer, self.options = model, loss_fn, optimizer, options
        self.example_batch = example_batch
        self._recompile, self._key_of = recompile, key_of
        self._lock = threading.RLock()
        self._own = OwnState(options)
        self._numbers: dict[Any, tuple[float, torch.Tensor]] = {}
        self._durations: list[float] = []
        #: compiled programs by the shapes of their batch, the most recently used last
        self._variants: OrderedDict[Any, Compiled] = OrderedDict()
        self.compilations = self.dropped = 0
        self.verified: bool | None = None
        self.last = SimpleNamespace(loss=None, outputs=None, grad_norm=None, skipped=None)
        self.optimizer_plan: OptimizerPlan | None = None
        self._padding = Padding(options) if options.shapes == "bucket" else None
        self._notice: Any = None
        self._holds_averages = False
        if compile_now:
            self._variant(self._fill(example_batch)[0])

    # ---- what a user asks --------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Runs one training step: forward, loss, backward, clipping, update. Returns what the loss function returns.

        With accumulation the loss is the mean over micro-batches, and outputs with a row per sample are put together.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise InputError(
                "the step was called in a DataLoader worker, which is another process with a copy of the model: what "
                "it learns there is lost; call it in the loop that reads the loader"
            )
        with self._lock, torch.inference_mode(False), torch.profiler.record_function("wholestep.step"):
            start = time.perf_counter()
            refuse_autocast("called")
            if self._holds_averages:
                raise InputError(
                    "the step was called inside `with step.averaged()`, where the model holds its averages: what it "
                    "learns there would be lost; leave the block first"
                )
            given = as_compiled(self.example_batch, batch, named)
            given, cut = self._fill(given)
            compiled, tensors = self._variant(given)
            result = self._run(compiled, tensors, given, cut)
            self._durations.append(time.perf_counter() - start)
            return result

    @property
    def device(self) -> torch.device:
        """Where the step runs and its batches must be."""
        return self._compiled.executable.device

    def program(self) -> Op:
        """The one program of the step; `str()` of it is MLIR text. With several shapes, the one used last."""
        return self._compiled.program.module

    @overload
    def report(self, format: None = None) -> Report: ...

    @overload
    def report(self, format: str) -> str: ...

    def report(self, format: str | None = None) -> Report | str:
        """What was compiled, what it moves and how it runs: `str()` is a table; format="json" or "html" gives text."""
        with self._lock:
            return report_of(self) if format is None else report_of(self).rendered(format)

    def plan(self) -> Plan:
        """A static plan of the program: order, addresses in one arena, what is written over what; `str()` sums it up.

        It is data for planning memory ahead. Steps run through the reference executor, which allocates as it goes.
        """
        with self._lock:
            compiled = self._compiled
            executable = compiled.executable
            tables = {
                "parameter": compiled.program.captured.parameters,
                "constant": compiled.program.captured.constants,
            }
            strides = [
                tables[slot.kind][slot.source[1]].stride() if slot.kind in tables else None
                for slot in compiled.program.slots
            ]
            return plan_function(compiled.program.function, executable.device, executable.numbers, strides=strides)[0]

    def opportunities(self) -> list[Opportunity]:
        """What could still be done to the program, with the change each is predicted to bring, or why it cannot."""
        return opportunities(self.program())

    @property
    def recipe(self) -> list[str]:
        """The transformations that were applied, in order: `ws.compile(..., recipe=step.recipe)` does them again."""
        return list(self._compiled.recipe)

    def refresh(self) -> None:
        """Call it after changing parameters through `.data`: their low-precision copies are made again."""
        self._own.refresh()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the compiled programs as text that `ws.load` reads: no code, no weights."""
        with self._lock:
            latest = self._compiled
            if self._key_of(self, latest.plan) != latest.key:
                raise InputError(
                    "the model's modes, its frozen layers or the optimizer's groups have changed since the last step; "
                    "run a step, then save"
                )
            programs = [c.program for c in self._variants.values() if c.key == latest.key]
            assert self.optimizer_plan is not None
            decisions = [{"name": key} for key in latest.recipe]
            options = self.options.to_json()
            write_step(
                path, programs, self.optimizer_plan, options, self.model, self.loss_fn, self.optimizer, decisions
            )

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, random state, and loss scale and averages where there are any, as plain state dicts."""
        with self._lock:
            return {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                **self._own.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; a checkpoint that does not fit changes nothing."""
        with self._lock:
            parameters = self._parameters()
            check_checkpoint(state, self.model, self.optimizer)
            self._own.check(state, parameters)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would train on the given tensors
            self._own.load(state, parameters)

    def ema_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict with the averaged parameters in it."""
        with self._lock:
            averages = self._averages()
            found = self.model.state_dict(keep_vars=True)
            return {k: averages.get(id(v), v).detach().clone() for k, v in found.items()}

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Inside the block the model holds the averages: `with step.averaged() as model: evaluate(model)`."""
        with self._lock, torch.no_grad():
            averages = self._averages()
            pairs = [(p, averages[id(p)], p.detach().clone()) for p in self._parameters().values() if id(p) in averages]
            outer, self._holds_averages = self._holds_averages, True
            try:
                for p, average, _ in pairs:
                    p.copy_(average)
                yield self.model
            finally:
                self._holds_averages = outer
                for p, _, kept in pairs:
                    p.copy_(kept)

    def __repr__(self) -> str:
        if not self._variants:
            return f"<TrainStep of {type(self.model).__name__}, not compiled>"
        counts = ", ".join(f"{n} {phase}" for phase, n in sizes(self.program()).items() if n)
        return f"<TrainStep of {type(self.model).__name__}: {counts} ops>"

    def __reduce__(self) -> Any:
        raise WholestepError(
            "a compiled step cannot be copied or sent to another process (a DataLoader's worker, perhaps, through its "
            "dataset or collate_fn); keep it in the training process, and checkpoint step.state_dict()"
        )

    # ---- compiling ---------------------------------------------------------------------------------------------------

    @property
    def _compiled(self) -> Compiled:
        """The program that was used last."""
        return next(reversed(self._variants.values()))

    def adopt(self, compiled: Compiled) -> Compiled:
        """Takes a compiled program in; beyond `max_variants` the least recently used one goes."""
        compiled.buffers = buffer_homes(self.model, self.loss_fn)
        self.optimizer_plan = compiled.plan
        if compiled.program.policy.low is not None and self._notice is None:
            self._notice = self.optimizer.register_step_post_hook(EagerStepNotice(self._own))
            weakref.finalize(self, self._notice.remove)
        self._variants[tuple([s.type.shape for s in compiled.batch_slots])] = compiled
        while len(self._variants) > (self.options.max_variants if self.options.shapes == "bucket" else 1):
            self._variants.popitem(last=False)
            self.dropped += 1
        return compiled

    def _compile(self, batch: Any) -> Compiled:
        refuse_autocast("compiled")
        with keep_random_state(), torch.inference_mode(False):
            compiled = self._recompile(self, batch)
        self.compilations += 1
        return self.adopt(compiled)

    def _variant(self, batch: Any) -> tuple[Compiled, list[torch.Tensor]]:
        """The program for a batch, and its tensors; compiled (again) where shapes, modes or groups ask for it."""
        if not self._variants:
            return self._compile(batch), flattened(batch)[0]
        tensors, names = self._checked(batch)
        latest = self._compiled
        shapes = signature([tensors[i] for i in latest.batch_types])
        compiled = self._variants.get(shapes)
        if compiled is None and self.options.shapes == "static":
            for (index, slot), have in zip(latest.batch_types.items(), shapes, strict=True):
                if have != slot.type.shape:
                    raise InputError(shape_message(names[index], slot.type.shape, have))
        if compiled is None or self._key_of(self, compiled.plan) != compiled.key:
            return self._compile(batch), tensors
        self._variants.move_to_end(shapes)
        return compiled, tensors

    def _checked(self, batch: Any) -> tuple[list[torch.Tensor], list[str]]:
        """The tensors of a batch that has the structure, dtypes and device of the compiled ones, and their names."""
        tensors, names, structure = flattened(batch)
        latest = self._compiled
        check_structure(latest.program.captured.exported.batch_structure, structure)
        for index, slot in latest.batch_types.items():
            check_tensor(names[index], tensors[index], torch_dtype(slot.type.element), latest.executable.device)
        return tensors, names

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _fill(self, batch: Any) -> tuple[Any, Cut | None]:
        """The batch padded to its bucket, where that is wanted and exact."""
        if self._padding is None:
            return batch, None
        if self._variants:
            self._checked(batch)
        return self._padding.fill(self, batch)

    def _run(self, compiled: Compiled, batch: list[torch.Tensor], given: Any, cut: Cut | None) -> Any:
        program = compiled.program
        created: dict[str, dict[str, Any]] = {}
        self._own.notice_changes()
        inputs = [self._fetch(slot, compiled, batch, created) for slot in program.slots]
        outputs = compiled.executable([t.detach() for t in inputs])
        if self.options.verify and self.verified is None:
            compare_with_eager(program, self.model, self.loss_fn, self.optimizer, given, self.options, outputs)
            self.verified = True
        by_kind: dict[str, list[torch.Tensor]] = {}
        for value, result in zip(outputs, program.results, strict=True):
            by_kind.setdefault("user" if result.kind in ("loss", "output") else result.kind, []).append(value)
        lasting = storages([*inputs, *(t for _, t in compiled.executable.fixed if isinstance(t, torch.Tensor))])
        user = [t.clone() if storage(t) in lasting else t for t in by_kind["user"]]  # before the parameters change
        if cut is not None:
            user = [cut_back(t, cut, dimensions) for t, dimensions in zip(user, cut.dimensions, strict=True)]
        exported = program.captured.exported
        result = unflatten(exported.output_structure, user)
        self._commit(compiled, inputs, outputs, created)
        norm, finite = by_kind.get("grad_norm"), by_kind.get("finite")
        self.last = SimpleNamespace(
            loss=user[exported.loss_index],
            outputs=result,
            grad_norm=norm[0] if norm else None,
            skipped=~finite[0] if finite else None,
        )
        self._own.watch_scale()
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
            return self._own.key()
        if kind in own_state.KINDS:
            return self._own.fetch(slot, captured.parameters, compiled.executable.device)
        if source == ("ema_weight",):
            return self._as_tensor(slot, self._own.ema_weight())
        if kind == "optimizer_state":
            _, fqn, key = source[:3]
            value = self.optimizer.state.get(captured.parameters[fqn], {}).get(key)
            if value is None:
                if fqn not in created:
                    created[fqn] = compiled.plan.initialise(fqn)
                value = created[fqn].get(key)
            if value is not None:
                return self._state_tensor(slot, value, compiled, created)
        return self._as_tensor(slot, compiled.plan.read(slot))

    def _state_tensor(self, slot: Slot, value: Any, compiled: Compiled, created: dict[str, Any]) -> torch.Tensor:
        """Optimizer state as the program wants it. A counter that the program may hold back moves to its device."""
        device = compiled.executable.device
        if not compiled.skips or (isinstance(value, torch.Tensor) and value.device == device):
            return self._as_tensor(slot, value)
        moved = torch.as_tensor(value, dtype=torch_dtype(slot.type.element), device=device)
        created.setdefault(slot.source[1], {})[slot.source[2]] = moved
        return moved

    def _as_tensor(self, slot: Slot, value: Any) -> torch.Tensor:
        dtype = torch_dtype(slot.type.element)
        if isinstance(value, torch.Tensor):
            return value if value.dtype == dtype else value.to(dtype)
        known = self._numbers.get(slot.source)
        if known is None or known[0] != value:
            known = (value, torch.tensor(value, dtype=dtype))
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
        captured = compiled.program.captured
        with uninterrupted(), torch.no_grad():
            for fqn, state in created.items():
                if state:
                    self.optimizer.state[captured.parameters[fqn]].update(state)
            into: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            for slot, value in writes:
                if slot.kind == "optimizer_state":
                    target = self.optimizer.state[captured.parameters[slot.source[1]]]
                    if not isinstance(target[slot.source[2]], torch.Tensor):
                        target[slot.source[2]] = type(target[slot.source[2]])(value.item())
                        continue
                    into.append(target[slot.source[2]])
                else:
                    into.append(place[slot.source])
                values.append(value)
            foreach_copy(into, values)
            compiled.plan.finish(compiled.program.updated)
            mark_optimizer_called(self.optimizer)
            self._own.counter += 1
            if self.options.ema is not None:
                self._own.average_the_rest(compiled.program.slots, captured.parameters)
                self._own.averaged += 1
            self._own.follow(compiled.program.slots, captured.parameters)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return named_state(self.model, self.loss_fn)[0]

    def _averages(self) -> dict[int, torch.Tensor]:
        """Averages by the identity of their parameter."""
        if self.options.ema is None:
            raise InputError("this step keeps no average of the parameters; compile it with ema=0.999")
        parameters = self._parameters()
        return {
            id(parameters[source[1]]): tensor
            for source, tensor in self._own.tensors.items()
            if source[0] == "ema" and source[1] in parameters
        }


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
                '`with torch.autocast(...)` block, and compile the step with precision="bf16" instead'
            )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds signals with Python handlers (Ctrl-C, alarms) back until the block is done; other threads get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}
    for number in SIGNALS:
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
