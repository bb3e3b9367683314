"""`TrainStep`: the compiled step as the user holds it.

Parameters, buffers and optimizer state stay in the user's own tensors and are updated there. Whatever may refuse a
batch runs before the first of them changes, and signals wait, so an exception or Ctrl-C finds the model at a border
between two steps.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import nn

from ..backends.choose import Choices
from ..budget import BudgetReport
from ..capture.capture import named_state
from ..capture.sandbox import keep_random_state
from ..capture.slots import Slot
from ..capture.structure import unflatten
from ..dialects.step import torch_dtype
from ..errors import InputError, WholestepError
from ..ir.core import Op
from ..options import Options
from ..plan import Plan, plan_function
from ..torch_private import foreach_copy, mark_optimizer_called, profiled, without_modes
from ..training.build import sizes
from ..training.optimizer_plan import OptimizerPlan
from ..transforms.late_updates import KEPT
from ..transforms.layout_prices import timed_by
from ..transforms.opportunity import Opportunity, opportunities, sites
from . import fusions, own_state
from .batches import as_compiled, check_structure, check_tensor, flattened, form_of, shape_message, signature
from .bound import BoundPlan
from .checkpoint import check_checkpoint
from .compiled import Compiled
from .counters import Counters
from .cuda_graph import Graphed
from .late import Promised
from .late import hook as hook_flush
from .own_state import EagerStepNotice, News, OwnState
from .padding import Cut, Padding, cut_back
from .predicted import predicted
from .replay import LongWay, Replay
from .replay_source import FAILED
from .report import Report, machine_of, report_of
from .saved import write_step
from .signals import Uninterrupted
from .static import Arena, StaticStep, Unfit
from .unchanged import Snapshot
from .verification import compare_with_eager

#: the steps of each model
STEPS: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[TrainStep]] = weakref.WeakKeyDictionary()
#: held while a step is compiled: torch traces in one thread at a time
COMPILING = threading.RLock()


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
        #: its form; the tensors themselves are the user's and not held
        self.example_batch = form_of(example_batch)
        self._recompile, self._key_of = recompile, key_of
        self._own = OwnState(options)
        self._lock, self._uninterrupted = self._own.lock, Uninterrupted()
        #: the memory of all compiled programs
        self.arena = Arena()
        #: who may run regions of the program; None where ATen runs everything
        self.choices: Choices | None = None
        #: what providers that cannot run here would have brought, as it was said
        self.lost: set[str] = set()
        self._numbers: dict[Any, tuple[float, torch.Tensor]] = {}
        self._durations = self._own.durations
        #: compiled programs by the shapes of their batch, the most recently used last
        self._variants: OrderedDict[Any, Compiled] = OrderedDict()
        self.compilations = self.dropped = 0
        self.verified: bool | None = None
        self._last = SimpleNamespace(loss=None, outputs=None, grad_norm=None, skipped=None)
        #: what the last step was done by, and its results, where nobody has asked for `last` yet
        self._done: tuple[Replay, list[torch.Tensor]] | None = None
        self._loss_news, self._latest_loss = News(), None
        self.optimizer_plan: OptimizerPlan | None = None
        self._padding = Padding(options) if options.shapes == "bucket" else None
        #: does the last step again by one call, where nothing has changed since
        self._again: Replay | None = None
        self._notice: Any = None
        self._holds_averages = False
        #: the program whose update waits for the next forward, what it will be done with, and memory for what it reads
        self._waiting: Compiled | None = None
        self._promised = Promised()
        self.kept_arena = Arena()
        #: all steps of the model, this one among them
        self._peers: weakref.WeakSet[TrainStep] = weakref.WeakSet()
        if compile_now:
            self._variant(self._fill(example_batch)[0])

    # ---- what a user asks --------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Runs one training step: forward, loss, backward, clipping, update. Returns what the loss function returns.

        With accumulation the loss is the mean over micro-batches, and outputs with a row per sample are put together.
        """
        again = self._again  # every line here is host time of a step, and most of it waits for memory
        if again is not None and again.compiled.reads.same_names():
            found = again.ready.pop() if again.ready else again.new_results()
            answer = again.once(batch, named, found)
            if not answer:
                self._done = again, found
                return found[again.only] if again.only >= 0 else self._handed_over(again.compiled, found, None)
            if answer == FAILED:
                again.fail()
        return self._in_turn(batch, named)

    @property
    def last(self) -> SimpleNamespace:
        """Of the last step: `loss`, `outputs`, `grad_norm` before clipping, and whether it was `skipped`."""
        done, self._done = self._done, None
        if done is not None:
            self._last = self._described(done[0].compiled, done[1], None)
        return self._last

    @property
    def device(self) -> torch.device:
        """Where the step runs and its batches must be."""
        return self._compiled.device

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
            if self._compiled.skips:
                self.flush()  # the loss scale and how many updates were skipped are state, too
            return report_of(self) if format is None else report_of(self).rendered(format)

    def plan(self) -> Plan:
        """The static plan the step runs from: order, addresses in one arena, what is written over what."""
        with self._lock:
            compiled = self._compiled
            if compiled.static is not None:
                return compiled.static.plan
            return plan_function(compiled.program.function, compiled.device, compiled.numbers)[0]

    def annotated(self, *batch: Any, **named: Any) -> Any:
        """One step, launch by launch, each in a range `ws:<its number in step.plan()>` that profilers of a GPU show."""
        with self._lock:
            given, _ = self._fill(as_compiled(self.example_batch, batch, named))
            compiled = self._variant(given)[0]
            self._leave(compiled)
            static = self._turn(compiled).static
            if static is None:
                raise InputError("this step has no plan to annotate: it runs through the reference executor")
            nvtx = torch.cuda.nvtx
            self._again = None  # a graph has no ranges
            static.ranges = (nvtx.range_push, nvtx.range_pop) if self.device.type == "cuda" else (str, lambda: None)
            try:
                return self(*batch, **named)
            finally:
                static.ranges = None

    def latest_loss(self) -> float | None:
        """The loss of a recent step, as soon as it is there: never waits for the device. None until one has arrived."""
        loss = self.last.loss
        if loss is None:
            return None
        for value in self._loss_news.exchange(loss.detach().float().mean()):
            self._latest_loss = value
        return self._latest_loss

    def opportunities(self) -> list[Opportunity]:
        """What could still be done to the program, with the change each is predicted to bring, or why it cannot."""
        with self._lock:
            module, compiled = self.program(), self._compiled
            with timed_by(compiled.layouts.looked_at()):
                found = [*opportunities(module, device=compiled.device), *fusions.refused(compiled.planned)]
            return predicted(module, found, compiled.planned, machine_of(compiled.device))

    def why_not(self, a: str, b: str) -> str:
        """Why two ops are not one kernel, or which kernel they are and who runs it, in one sentence.

        a, b: sites as `step.recipe` and `step.opportunities()` show them, patterns such as "*mlp*/gelu#0", or the name
        of a layer, which stands for what it does in forward.
        """
        with self._lock:
            return fusions.why_not(self._compiled.planned, a, b, list(sites(self.program())))

    @property
    def budget(self) -> BudgetReport | None:
        """What was done to keep to `memory_budget`, and what it costs; None without one."""
        return self._compiled.budget

    @property
    def recipe(self) -> list[str]:
        """The transformations that were applied, in order: `ws.compile(..., recipe=step.recipe)` does them again."""
        return [*self._compiled.recipe, *fusions.recipe_of(self._compiled.planned)]

    def flush(self) -> None:
        """Brings parameters and optimizer state up to date where updates wait for the next forward; else does nothing.

        Calls of the model, state dicts, loading them and eager optimizer steps do so by themselves. Call it before
        reading or writing parameters or optimizer state in any other way.
        """
        if self._waiting is None:
            return
        with self._lock, torch.inference_mode(False), without_modes():  # it may be asked for while somebody traces
            self._flush()

    def refresh(self) -> None:
        """Call it after changing parameters through `.data`: their low-precision copies are made again."""
        self._own.refresh()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the compiled programs as text that `ws.load` reads: no code, no weights."""
        with self._lock:
            latest = self._compiled
            if self._key_of(self, latest.plan) != latest.key or latest.reads.changes():
                raise InputError(
                    "the model's modes or settings, its frozen layers or the optimizer's groups have changed since the "
                    "last step; run a step, then save"
                )
            same = [c for c in self._variants.values() if c.key == latest.key]
            programs = [c.program if c.late is None else c.late.whole.program for c in same]
            assert self.optimizer_plan is not None
            decisions = [{"name": key} for key in latest.recipe]
            options = self.options.to_json()
            write_step(
                path, programs, self.optimizer_plan, options, self.model, self.loss_fn, self.optimizer, decisions
            )

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, random state, and loss scale and averages where there are any, as plain state dicts."""
        with self._lock:
            self.flush()
            return {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                **self._own.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; a checkpoint that does not fit changes nothing."""
        with self._lock:
            self.flush()
            parameters = self._parameters()
            check_checkpoint(state, self.model, self.optimizer)
            self._own.check(state, parameters)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would train on the given tensors
            self._own.load(state, parameters)
            for program in [p for compiled in self._variants.values() for p in compiled.programs()]:
                program.snapshot = None  # averages and the loss scale are other tensors now

    def ema_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict with the averaged parameters in it."""
        with self._lock:
            self.flush()
            averages = self._averages()
            found = self.model.state_dict(keep_vars=True)
            return {k: averages.get(id(v), v).detach().clone() for k, v in found.items()}

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Inside the block the model holds the averages: `with step.averaged() as model: evaluate(model)`."""
        with self._lock, torch.no_grad():
            self.flush()
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

    def __del__(self) -> None:
        if getattr(self, "_waiting", None) is not None and not sys.is_finalizing():
            self.flush()

    # ---- compiling ---------------------------------------------------------------------------------------------------

    @property
    def _compiled(self) -> Compiled:
        """The program that was used last."""
        return next(reversed(self._variants.values()))

    def adopt(self, compiled: Compiled) -> Compiled:
        """Takes a compiled program in; beyond `max_variants` the least recently used one goes."""
        for program in compiled.programs():
            program.buffers = buffer_homes(self.model, self.loss_fn)
        if self.optimizer_plan is None:
            self._peers = STEPS.setdefault(self.model, self._peers)
            self._peers.add(self)
            if self.options.late:
                hook_flush(self)
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
        self.flush()
        with COMPILING, keep_random_state(), torch.inference_mode(False):
            compiled = self._recompile(self, batch)
        self.compilations += 1
        return self.adopt(compiled)

    def _warm(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Compiled, list[torch.Tensor]] | None:
        """The program used last and the tensors of a batch, where nothing has changed since; None where it may have."""
        if self._padding is not None or not self._variants:
            return None
        latest = self._compiled
        if latest.snapshot is None or (tensors := latest.tensors_of(self.example_batch, batch, named)) is None:
            return None
        return (latest, tensors) if latest.snapshot.holds() else None

    def _variant(self, batch: Any) -> tuple[Compiled, list[torch.Tensor]]:
        """The program for a batch, and its tensors; compiled (again) where shapes, modes or groups ask for it."""
        if not self._variants:
            return self._compile(batch), flattened(batch)[0]
        latest = self._compiled
        tensors, names = self._checked(batch)
        shapes = signature([tensors[i] for i in latest.batch_types])
        compiled = self._variants.get(shapes)
        if compiled is None and self.options.shapes == "static":
            for (index, slot), have in zip(latest.batch_types.items(), shapes, strict=True):
                if have != slot.type.shape:
                    raise InputError(shape_message(names[index], slot.type.shape, have))
        if compiled is None:
            return self._compile(batch), tensors
        if compiled.snapshot is None or not compiled.snapshot.holds():
            compiled.snapshot = None
            if self._key_of(self, compiled.plan) != compiled.key or self._say_changes(compiled.reads.changes()):
                return self._compile(batch), tensors
        self._variants.move_to_end(shapes)
        return compiled, tensors

    def _say_changes(self, changes: list[str]) -> bool:
        """Warns of Python values that a program was made from and that are others now; whether there are any."""
        if changes:
            more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
            warnings.warn(
                f"the step is compiled again: {'; '.join(changes[:3])}{more}. Where a number changes often, make it a "
                "tensor on the model's device, which a step reads every time: weight = torch.tensor(0.1, device=...), "
                "then weight.fill_(0.2)",
                stacklevel=2,
            )
        return bool(changes)

    def _checked(self, batch: Any) -> tuple[list[torch.Tensor], list[str]]:
        """The tensors of a batch that has the structure, dtypes and device of the compiled ones, and their names."""
        tensors, names, structure = flattened(batch)
        latest = self._compiled
        check_structure(latest.program.captured.exported.batch_structure, structure)
        for index, slot in latest.batch_types.items():
            check_tensor(names[index], tensors[index], torch_dtype(slot.type.element), latest.device)
        return tensors, names

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _in_turn(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A step that one call may not do, or not without asking more."""
        if torch.utils.data.get_worker_info() is not None:
            raise InputError(
                "the step was called in a DataLoader worker, which is another process with a copy of the model: what "
                "it learns there is lost; call it in the loop that reads the loader"
            )
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._timed(batch, named)
        return self._timed(batch, named)

    def _timed(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        with self._lock, profiled("wholestep.step"):
            start = time.perf_counter()
            refuse_autocast("called")
            if self._holds_averages:
                raise InputError(
                    "the step was called inside `with step.averaged()`, where the model holds its averages: what it "
                    "learns there would be lost; leave the block first"
                )
            again = self._again
            found = None if again is None or not again.compiled.reads.same_names() else again(batch, named)
            if again is None or found is None:
                result = self._long_way(batch, named)
            else:
                mark_optimizer_called(self.optimizer)
                result = self._handed_over(again.compiled, found, None)
            self._durations.append(time.perf_counter() - start)
            return result

    def _long_way(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A step of which something may have changed since the last one."""
        self._go_the_long_way()
        cut = None
        if len(self._peers) > 1:
            for peer in self._peers:
                if peer is not self:
                    peer.flush()
        warm = self._warm(batch, named)
        if warm is None:
            given, cut = self._fill(as_compiled(self.example_batch, batch, named))
            warm = self._variant(given)
            self._verify(*warm, given)
        return self._run(*warm, cut)

    def _go_the_long_way(self) -> None:
        """The next step is not done again by one call."""
        again, self._again = self._again, None
        if again is not None:
            again.settle()

    def _fill(self, batch: Any) -> tuple[Any, Cut | None]:
        """The batch padded to its bucket, where that is wanted and exact."""
        if self._padding is None:
            return batch, None
        if self._variants:
            self._checked(batch)
        return self._padding.fill(self, batch)

    def _verify(self, compiled: Compiled, batch: list[torch.Tensor], given: Any) -> None:
        """Compares the first step with an eager one, where the user wants that."""
        if not self.options.verify or self.verified is not None:
            return
        if compiled.late is not None:
            compiled = compiled.late.whole
        program = compiled.program
        inputs = [self._fetch(slot, compiled, batch, {}) for slot in program.slots]
        outputs = compiled.executable([t.detach() for t in inputs])
        compare_with_eager(program, self.model, self.loss_fn, self.optimizer, given, self.options, outputs)
        self.verified = True

    def _run(self, compiled: Compiled, batch: list[torch.Tensor], cut: Cut | None) -> Any:
        self._leave(compiled)
        with self._uninterrupted, torch.no_grad():
            runs = self._turn(compiled)
            found = self._executed(runs, batch)
            if runs is compiled:
                self._updated(compiled)
            if compiled.late is not None:
                self._waiting = compiled
                self._promised.keep(compiled)
                compiled.late.written.keep()
                for peer in self._peers:
                    peer._go_the_long_way()  # and flushes this one first
            mark_optimizer_called(self.optimizer)
            self._own.counter += 1
        return self._handed_over(runs, found, cut)

    def _executed(self, compiled: Compiled, batch: list[torch.Tensor]) -> list[Any]:
        """Runs a program, from its plan or by the reference executor."""
        if compiled.static is not None:
            found = self._run_planned(compiled, compiled.static, batch)
        if compiled.static is None:
            found = self._run_reference(compiled, batch)
        return found

    def _updated(self, compiled: Compiled) -> None:
        """After an update: what the host counts of it."""
        program = compiled.program
        compiled.plan.finish(program.updated)
        if self.options.ema is not None:
            self._own.average_the_rest(program.slots, program.captured.parameters)
            self._own.averaged += 1

    # ---- updates that wait for the next forward ----------------------------------------------------------------------

    def _turn(self, compiled: Compiled) -> Compiled:
        """The program that the next step runs: without an update where none is waiting."""
        if compiled.late is None or self._waiting is not None:
            return compiled
        return still_bound(compiled.late.first)

    def _leave(self, compiled: Compiled) -> None:
        """Before a step of a program: an update of another one does not wait any longer."""
        if self._waiting is None:
            return
        if self._waiting is not compiled:
            self.flush()
        elif compiled.late is not None and not compiled.late.written.same():
            raise InputError(
                "a parameter was written since the last step, whose update waits for the next forward and would be "
                "made of the new value; call step.flush() before writing parameters (now, to go on all the same)"
            )

    def _done_with(self) -> None:
        """No update waits any longer."""
        self._waiting = None
        self._promised.numbers.clear()

    def _flush(self) -> None:
        """Does the update that waits."""
        if self._waiting is None or self._waiting.late is None:
            return
        update = still_bound(self._waiting.late.update)
        for name, parameter in self._parameters().items():
            if parameter.device != update.device:
                self._done_with()
                raise InputError(
                    f"{name} was moved from {update.device} to {parameter.device} while its update waited for the next "
                    "forward, so that update is lost; call step.flush() before moving the model"
                )
        with self._uninterrupted, torch.no_grad():
            self._executed(update, [])
            self._updated(update)
            self._done_with()

    def _handed_over(self, compiled: Compiled, found: list[Any], cut: Cut | None) -> Any:
        """The results of a step as the user gets them."""
        self._last, self._done = self._described(compiled, found, cut), None
        self._own.watch_scale()
        return self._last.outputs

    def _described(self, compiled: Compiled, found: list[Any], cut: Cut | None) -> SimpleNamespace:
        """What `last` shows of a step with these results."""
        user = [found[i] for i in compiled.users]
        norm = None if compiled.norm is None else found[compiled.norm]
        finite = None if compiled.finite is None else found[compiled.finite]
        if cut is not None:
            user = [cut_back(t, cut, dimensions) for t, dimensions in zip(user, cut.dimensions, strict=True)]
        exported = compiled.program.captured.exported
        return SimpleNamespace(
            loss=user[exported.loss_index],
            outputs=unflatten(exported.output_structure, user),
            grad_norm=norm,
            skipped=None if finite is None else ~finite,
        )

    def _run_planned(self, compiled: Compiled, static: StaticStep, batch: list[torch.Tensor]) -> list[Any]:
        """A step from the plan. The results are the user's to keep."""
        program, own = compiled.program, self._own
        created: dict[str, dict[str, Any]] = {}
        parameters = program.captured.parameters
        put: Callable[[list[Any]], bool]
        own.notice_changes()
        if compiled.snapshot is None:
            own.make_room(program.slots, parameters, compiled.device, compiled.laid)
            inputs = [self._fetch(slot, compiled, batch, created) for slot in program.slots]
            put = partial(put_first, {i: float(inputs[i]) for i in compiled.numbers})
            try:
                self._refuse_converted(compiled, inputs, created)
                static.bind(inputs)
            except Unfit as error:
                compiled.static, compiled.unplanned = None, str(error)
                return []
            assert static.bound is not None
            own.watch(program.slots, parameters, static.bound)
        else:
            own.follow_parameters(program.slots, parameters, compiled.device)
            put = compiled.put_numbers
        installed = self._install(compiled, created)
        try:
            bound = static(batch, put, (own.seed, own.counter, 0))
        except BaseException as error:
            if compiled.late is not None and static.completed(error):
                assert static.bound is not None
                self._settle(compiled, static, static.bound)
                self._updated(compiled)
                self._done_with()  # the model is as after the step before, with its update
                compiled.snapshot = None
                raise
            written = static.written_before(error)
            compiled.snapshot = None
            if written:
                raise WholestepError(
                    f"the step failed after it had begun to change the model ({written} first): {error}\n"
                    "Load the last checkpoint before going on"
                ) from error
            for parameter, keys in installed:
                for key in keys:
                    del self.optimizer.state[parameter][key]
                if not self.optimizer.state[parameter]:
                    del self.optimizer.state[parameter]
            raise
        self._settle(compiled, static, bound)
        if static.replayed and static.alike and self._padding is None and not compiled.waits:
            self._again = self._repeatable(compiled, static)
        return [v.clone() for v in bound.outputs(compiled.returned, static.alike)]

    def _settle(self, compiled: Compiled, static: StaticStep, bound: BoundPlan) -> None:
        """After a planned step: counters get their new numbers, and what was bound is written down."""
        program, own = compiled.program, self._own
        if compiled.snapshot is None:
            pack = compiled.device.type == "cuda" and bound.cells.room
            buffers = [r.buffer for r in static.plan.results]
            compiled.counters = Counters(
                program,
                compiled.plan,
                compiled.numbers,
                buffers,
                self.optimizer,
                own.ema_weight,
                bound.numbers.stands_for,
                pack,
            )
            if compiled.waits:
                compiled.counters.read = partial(self._promised.read, compiled.plan)
        counters = compiled.counters
        assert counters is not None
        counters.write(bound.values, static.alike)
        if compiled.snapshot is None:
            roots = [m for m in (self.model, self.loss_fn) if isinstance(m, nn.Module)]
            compiled.snapshot = Snapshot(roots, self.optimizer, compiled.plan, compiled.hypers, compiled.reads)
        own.after_step(program.slots, program.captured.parameters, static.replayed)

    def _repeatable(self, compiled: Compiled, static: StaticStep) -> Replay | None:
        """What does the step that has just run as a graph again by one call."""
        again, graph = compiled.again, static.graph.graph if isinstance(static.graph, Graphed) else None
        if again is None or not again.stands():
            compiled.again = None
            if graph is None or compiled.long_way[0] is graph:
                return None
            try:
                again = compiled.again = Replay(compiled, self._own, self.optimizer, self.example_batch)
            except LongWay as why:
                compiled.long_way = (graph, str(why))
                return None
        else:
            again.load()
        return again

    def _refuse_converted(self, compiled: Compiled, inputs: list[torch.Tensor], created: dict[str, Any]) -> None:
        """Raises where state of the optimizer is not a tensor that can be updated in place."""
        numbers = set(compiled.numbers)
        for i, (slot, tensor) in enumerate(zip(compiled.program.slots, inputs, strict=True)):
            if slot.kind != "optimizer_state" or i in numbers:
                continue
            _, fqn, key = slot.source[:3]
            held = self.optimizer.state.get(compiled.program.captured.parameters[fqn], {}).get(key)
            if held is not tensor and created.get(fqn, {}).get(key) is not tensor:
                raise Unfit(f"{slot.name} of the optimizer is a {type(held).__name__} that cannot be updated in place")

    def _install(self, compiled: Compiled, created: dict[str, dict[str, Any]]) -> list[tuple[Any, list[str]]]:
        """Puts the state that the first step makes into the optimizer; says what was put where."""
        installed = []
        for fqn, state in created.items():
            if state:
                parameter = compiled.program.captured.parameters[fqn]
                self.optimizer.state[parameter].update(state)
                installed.append((parameter, list(state)))
        return installed

    def _run_reference(self, compiled: Compiled, batch: list[torch.Tensor]) -> list[Any]:
        """A step through the reference executor: every new value is computed, then all are written."""
        program, created = compiled.program, dict[str, dict[str, Any]]()
        self._own.notice_changes()
        inputs = [self._fetch(slot, compiled, batch, created) for slot in program.slots]
        outputs = compiled.executable([t.detach() for t in inputs])
        lasting = storages([*inputs, *(t for _, t in compiled.executable.fixed if isinstance(t, torch.Tensor))])
        kept = [outputs[i] for i in compiled.returned]
        kept = [v.clone() if storage(v) in lasting else v for v in kept]  # before the parameters change
        self._commit(compiled, inputs, outputs, created)
        return kept

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
        if kind == KEPT:
            return compiled.kept[source]
        if kind in own_state.KINDS:
            return self._own.fetch(slot, captured.parameters, compiled.device, compiled.laid.get(source))
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
        return self._as_tensor(slot, self._promised.read(compiled.plan, slot))

    def _state_tensor(self, slot: Slot, value: Any, compiled: Compiled, created: dict[str, Any]) -> torch.Tensor:
        """Optimizer state as the program wants it. A counter that the program may hold back moves to its device."""
        device = compiled.device
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
        """Writes every new value into the user's tensors."""
        place = {slot.source: tensor for slot, tensor in zip(compiled.program.slots, inputs, strict=True)}
        writes = [
            (r.slot, value) for r, value in zip(compiled.program.results, outputs, strict=True) if r.slot is not None
        ]
        written = storages([place[slot.source] for slot, _ in writes])
        writes = [  # a new value that is a piece of state itself (two buffers that swap) is taken out before it changes
            (slot, value.clone() if storage(value) in written else value) for slot, value in writes
        ]
        self._install(compiled, created)
        captured = compiled.program.captured
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


def still_bound(compiled: Compiled) -> Compiled:
    """A program that takes turns with others: it is bound again where something has changed since its last turn."""
    if compiled.snapshot is not None and not compiled.snapshot.holds():
        compiled.snapshot = None
    return compiled


def put_first(numbers: dict[int, float], values: list[Any]) -> bool:
    """Puts the numbers of a first step, by argument, into the values of its plan."""
    for index, number in numbers.items():
        values[index] = number
    return False


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
