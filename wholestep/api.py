"""`ws.compile`: the pipeline from a model, a loss and an optimizer to one program, top to bottom."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import machine
from .backends.attentions import Decision, choose_attentions
from .backends.choose import Choices, choices_for
from .backends.kernels import Kernels
from .backends.layouts import PATIENCE, LayoutClock
from .backends.progress import Bar
from .backends.providers import providers_for, why_nothing_is_fused
from .backends.store import Store, fingerprint
from .budget import BudgetReport, fit_budget
from .capture.capture import capture, named_state
from .capture.reads import all_settings, names_read
from .capture.slots import Slot
from .capture.structure import flatten
from .cost import note_bound
from .dialects.strides import is_dense, is_laid_out, row_major, same_places
from .errors import InputError
from .ir.collector import collector_paused
from .ir.passes import run_pipeline
from .ir.types import F16
from .ir.verify import verify as verify_ir
from .options import Options, Scaling
from .plan.planner import Planned, planned_function
from .runtime import library_memory
from .runtime.batches import first_micro_batch, flattened
from .runtime.compiled import Compiled, laid_by_step
from .runtime.late import Late, check_can_wait, kept_strides, make_room
from .runtime.record import Subjects, record
from .runtime.replay import build_ahead
from .runtime.report import machine_of
from .runtime.saved import read_step, reading
from .runtime.static import StaticStep, check_fits
from .runtime.train_step import TrainStep
from .torch_private import has_backward_hooks, has_gradient_hooks
from .training.build import Program, build_step
from .training.optimizer_plan import OptimizerPlan
from .training.optimizers import plan_optimizer
from .training.precision import parse_precision
from .transforms import (  # noqa: F401  (they register)
    bit_masks,
    casts,
    chunked_loss,
    direct,
    early_norm,
    grouped_attention,
    inner_sums,
    join_slices,
    join_zeros,
    kept,
    layout,
    masks,
    offload,
    recompute,
    regenerate,
    row_gradients,
    shared_input,
    summed_products,
    sums_through,
    symmetric_product,
    through_loss,
    through_norm,
    whole_norm,
    wide_loss,
)
from .transforms import pad as filled_products  # noqa: F401
from .transforms.fusion_wishes import Wishes, not_fused
from .transforms.late_updates import late_updates
from .transforms.layout_prices import Timing, timed_by
from .transforms.layout_rules import channels_last, is_convolution
from .transforms.opportunity import do_nothing, meant, policy_named, possible, take, transform, whatever
from .transforms.recognise import recognise

#: what every program goes through once it is whole
PIPELINE = "fold-masks,place-casts,cse,dce,regenerate"
#: what is taken first, wherever it is possible: on GPUs, and where kernels are generated, which want it so as well
FIRST = "channels_last"


@dataclass(frozen=True, slots=True)
class Default:
    """A transformation that is taken after that wherever it is possible, all its opportunities at once."""

    name: str
    level: int = 1
    #: the kind of device it is for; any where it is empty
    device: str = "cuda"
    #: only where kernels are generated
    fused: bool = False
    #: where there is a budget of memory, that decides
    budgeted: bool = False
    #: only where products take along what follows them, and no budget wants a loss in chunks
    followed: bool = False

    def suits(self, level: int, device: str, fuses: bool, follows: bool) -> bool:
        able = (fuses or not self.fused) and (follows or not self.followed)
        return level >= self.level and self.device in ("", device) and able


DEFAULTS = (
    Default("grouped_attention", level=2, device=""),
    Default("shared_input", fused=True),  # who does not fuse would copy gradients side by side
    Default("whole_norm", level=2, fused=True),
    Default("join_slices"),
    Default("sums_through", level=2, fused=True),  # once gradients of one input's readers are side by side
    *map(Default, ("symmetric_product", "direct", "pad", "pointwise_convolution")),
    Default("summed_products", level=2, fused=True),  # who does not fuse would copy what they read
    Default("join_zeros", level=2, fused=True),  # once it is known what products end with
    Default("early_norm", level=3, fused=True),  # once 1x1 convolutions are products
    Default("through_norm", level=3, fused=True),
    Default("bit_masks", level=3, fused=True),  # who does not fuse would write masks in a pass
    Default("inner_sums", level=3, fused=True),
    Default("through_loss", level=3, followed=True),
    Default("wide_loss", fused=True, budgeted=True),  # op by op it would write logits in f32; a loss may go in chunks
    Default("row_gradients", fused=True),  # who does not fuse would write the whole gradient all the same
)


def compile(
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    *,
    precision: str | Mapping[str, str] = "fp32",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    skip_nonfinite: bool = False,
    loss_scale: float | Mapping[str, float] | None = None,
    ema: float | None = None,
    updates: str = "in_step",
    shapes: str = "static",
    max_variants: int = 8,
    pad: Mapping[str, float] | None = None,
    level: int = 3,
    memory_budget: str | int | float | None = None,
    providers: Sequence[str] | None = None,
    tune: bool | str = True,
    recipe: Sequence[str] = (),
    force: Sequence[str] = (),
    forbid: Sequence[str] = (),
    policy: str | None = None,
    verify: bool = False,
) -> TrainStep:
    """Compiles one whole training step: forward, loss, backward, clipping and the optimizer's update.

    loss_fn: `loss_fn(model, *batch)`, or `loss_fn(output, target)`, or None where the model returns its own loss.
    example_batch: a tuple of tensors (or a nesting of them), or a mapping for keyword batches. Later batches have the
        same structure and dtypes, and the same shapes unless `shapes` says otherwise.
    precision: "fp32", "bf16" or "fp16" (with dynamic loss scaling); or overrides by layer or op such as
        {"default": "bf16", "lm_head": "fp32"}. Parameters and optimizer state stay as they are.
    clip_norm: clips gradients by their global norm, as `torch.nn.utils.clip_grad_norm_`; the norm before clipping is
        `step.last.grad_norm`. math.inf measures without clipping.
    clip_value: clips each element of the gradients, as `torch.nn.utils.clip_grad_value_`.
    accumulate: splits each batch into this many micro-batches along its first dimension; one update for all of them.
    skip_nonfinite: leaves parameters and optimizer state as they are where a gradient is infinite or NaN.
    loss_scale: for fp16: the first scale, or the settings of `torch.amp.GradScaler` as a dictionary.
    ema: keeps an exponential moving average of the parameters with this decay: `step.ema_state_dict()`.
    updates: "in_step", or "in_next_forward": a step leaves its update to the next one, which updates each weight
        shortly before forward reads it (on a GPU "beside_next_forward" does so on a second stream). Gradients stay in
        memory between steps, and until `step.flush()` parameters are those before the last update; calls of the model
        and state dicts flush by themselves (docs/execution.md).
    shapes: "static" (another shape is an error) or "bucket" (another shape is compiled too, at most `max_variants` of
        them; the least recently used goes). `pad` says with what a shorter batch may be filled up to its bucket.
    memory_budget: the most memory that a step may need: "24GB", a number of bytes, or as a float a share of the peak it
        has without a budget. Parts of forward are then computed again in backward, the cheapest that will do; with
        PyTorch's kernels results do not change by a bit. Where it is cheaper, a loss over a large vocabulary is taken
        in chunks instead, which adds in another order. One that cannot be met is an error that says the least that can
        (docs/memory.md).
    level: transformations up to this level are taken by themselves: 1 single ops, 2 neighbours, 3 the whole step,
        4 devices and memories. 0 runs the program as it is, op by op; below 2 nothing is fused.
    providers: who may run what was fused: "aten" (PyTorch's kernels; beside others also "cublas" and "cudnn", the
        libraries below them, without PyTorch between), "triton" (generated for NVIDIA GPUs), "cpp" (generated for
        CPUs), "inductor" (PyTorch's compiler; only where it is named), or one that was registered. ["aten"] alone is
        PyTorch, op by op. By default all of them; `WHOLESTEP_PROVIDERS=aten,...` in the environment changes that.
    tune: times competing kernels and layouts on this machine, once: the results are kept (`wholestep cache`). "max"
        also tries matrix products as one kernel with what comes before or after them, which takes long to build, and
        waits for "inductor", which has a minute otherwise.
    recipe: transformations to apply, as an earlier `step.recipe` lists them. force, forbid: keys or patterns of
        `step.opportunities()`, such as "recompute */gelu#*", that must or must not be applied.
    policy: the name of a policy that was registered: it picks among what can still be done, up to `level`
        (docs/transformations.md).
    verify: runs the first step in eager PyTorch too, on copies, and raises if any tensor differs.

    The model and the optimizer stay the truth: their tensors are updated in place, and compiled and eager steps may be
    mixed in any order. A compile that fails changes nothing.
    """
    machine.protect()
    options = Options(
        precision=dict(precision) if isinstance(precision, Mapping) else precision,
        clip_norm=clip_norm,
        clip_value=clip_value,
        accumulate=accumulate,
        skip_nonfinite=skip_nonfinite,
        loss_scale=Scaling() if loss_scale is None else loss_scale,  # type: ignore[arg-type]
        ema=ema,
        updates=updates,
        shapes=shapes,
        max_variants=max_variants,
        pad=pad,
        level=level,
        memory_budget=memory_budget,  # type: ignore[arg-type]
        providers=providers,  # type: ignore[arg-type]
        tune=tune,
        recipe=recipe,  # type: ignore[arg-type]
        force=force,  # type: ignore[arg-type]
        forbid=forbid,  # type: ignore[arg-type]
        policy=policy,
        verify=verify,
    )
    check_options(options)
    return TrainStep(model, loss_fn, optimizer, as_batch(example_batch), compile_step, program_key, options)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    *,
    containers: Sequence[type] = (),
) -> TrainStep:
    """A step that `step.save` wrote, for the same model, loss and optimizer: nothing is captured or differentiated.

    containers: classes of batches and outputs other than tuples, lists and dictionaries (named tuples, ModelOutput);
        names in a file are never imported. The file holds no code and no weights: load those as state dicts.
    """
    machine.protect()
    start = time.perf_counter()
    saved = read_step(path, model, loss_fn, optimizer, containers)
    with reading(str(path)):
        options = Options.from_json(saved.options)
        check_options(options)
        batch, read = saved.example_batch, time.perf_counter() - start
        step = TrainStep(model, loss_fn, optimizer, batch, compile_step, program_key, options, compile_now=False)
        for program in saved.programs:
            program.policy = parse_precision(options.precision)
            names = names_read(loss_fn)
            roots = (model, loss_fn, *(read.value for read in names))
            program.captured.reads = reads = all_settings(*roots)  # which of them it was made from is not known
            reads.names, reads.tensors = names, list(program.captured.constants.values())
            recipe = [d["name"] for d in saved.decisions]
            attentions = attentions_of(step, program, device_of(model, loss_fn))  # anew: this may be another machine
            seconds = {"load": read / len(saved.programs)}
            compiled = executable_of(step, program, saved.plan, seconds, recipe)
            if step.choices is not None and exceeds(compiled, options.memory_budget):
                step.choices = step.choices.leaner()  # as when it was fitted, see `BudgetReport.lean`
                compiled = executable_of(step, program, saved.plan, seconds, recipe)
            compiled.attentions = attentions
            step.adopt(compiled)
    return step


def exceeds(compiled: Compiled, budget: int | float | None) -> bool:
    """Whether a plan needs more than a budget of bytes; a share of memory was one of a peak that is not known here."""
    return isinstance(budget, int) and compiled.static is not None and compiled.static.plan.peak > budget


@collector_paused()  # a program is a large graph that stays: collecting it again and again finds nothing
def compile_step(step: TrainStep, batch: Any) -> Compiled:
    """One compilation, from capture to the executable."""
    options = step.options
    check_model(step.model, step.loss_fn, step.optimizer, batch)
    clock = time.perf_counter
    start = clock()
    device = device_of(step.model, step.loss_fn)
    choices = choices_of(step, device)
    fuses = choices is not None  # compilers of kernels start while Python captures
    follows = choices is not None and bool(choices.followers()) and options.memory_budget is None
    if device.type == "cuda":
        build_ahead()
    captured = capture(step.model, step.loss_fn, first_micro_batch(batch, options.accumulate))
    if fuses:
        recognise(captured.function)
    captured_at = clock()
    plan = plan_optimizer(step.optimizer, captured.parameters, step.optimizer_plan)
    program = build_step(captured, plan, options)
    built_at = clock()
    run_pipeline(program.module, PIPELINE)
    note_bound(program.function)  # of the step as it is now: nothing that is done to it later changes what it must move
    policy = whatever(FIRST) if options.level and (fuses or device.type == "cuda") else do_nothing
    layouts, layout_clock = timing_of(step, program, device, policy is not do_nothing)
    with timed_by(layouts):
        recipe = transform(
            program.module,
            policy,
            recipe=not_fused(options.recipe),
            force=not_fused(options.force),
            forbid=not_fused(options.forbid),
            levels=range(1, options.level + 1),
        )
    suited = [d for d in DEFAULTS if not options.recipe and d.suits(options.level, device.type, fuses, follows)]
    later = [d.name for d in suited if d.budgeted and options.memory_budget is not None]
    now = [d.name for d in suited if d.name not in later]
    recipe += take(program.module, now, not_fused(options.forbid), device)
    if options.policy is not None:
        levels, forbid = range(1, options.level + 1), not_fused(options.forbid)
        with timed_by(layouts):
            chosen = policy_named(options.policy)
            recipe += transform(program.module, chosen, forbid=forbid, levels=levels, device=device)
    if fuses and options.level >= 3 and not options.recipe:  # in a kernel that is reading anyway, work costs nothing
        quick = device.type == "cuda" and options.memory_budget is None
        run_pipeline(program.module, "cse")  # what forward has already is not asked for by a copy
        recipe += kept.cut(program.module, not_fused(options.forbid), kept.WITHOUT_BUDGET if quick else None)
    run_pipeline(program.module, "cse,dce" if recipe else "dce")
    timed = 0.0 if layout_clock is None else layout_clock.close()
    attentions = attentions_of(step, program, device)
    budget: BudgetReport | None = None
    if options.memory_budget is not None:
        losses = [o.key for name in later for o in possible(program.module, name, not_fused(options.forbid))]
        numbers = host_numbers(program, step.optimizer)
        strides = argument_strides(program, step, batch, laid_by_step(program))

        def note(planned: Planned) -> None:  # what libraries take counts
            if device.type == "cuda":
                library_memory.measure(planned, device)

        budget, more = fit_budget(
            program.module,
            program.function,
            device,
            numbers,
            strides,
            options.memory_budget,
            machine_of(device),
            options.forbid,
            offload=device.type == "cuda" and options.level >= 4,
            choices=choices_of(step, device),
            wishes=Wishes.among(options.recipe, options.force, options.forbid),
            note=note,
            losses=losses,
        )
        recipe += more
        if budget.lean and step.choices is not None:
            step.choices = step.choices.leaner()
    optimised_at = clock()
    verify_ir(program.module)
    seconds = {
        "capture": captured_at - start,
        "autodiff + update": built_at - captured_at,
        "passes": optimised_at - built_at - timed,
        **({"time layouts": timed} if timed else {}),
        "verify": clock() - optimised_at,
    }
    compiled = executable_of(step, program, plan, seconds, recipe, batch)
    compiled.budget, compiled.attentions, compiled.layouts = budget, attentions, layouts
    compiled.untimed = {} if layout_clock is None else layout_clock.problems
    return compiled


def executable_of(
    step: TrainStep,
    program: Program,
    plan: OptimizerPlan,
    seconds: dict[str, float],
    recipe: Sequence[str] = (),
    batch: Any = None,
) -> Compiled:
    """A program made ready to run for this step."""
    refuse_overlap(program, step)
    wishes = Wishes.among(step.options.recipe, step.options.force, step.options.forbid)
    if step.options.late:
        return late_executable(step, program, plan, seconds, recipe, batch, wishes)
    compiled = made_ready(step, program, plan, seconds, recipe, batch, wishes)
    wishes.check(compiled.fusions)
    return compiled


def late_executable(
    step: TrainStep,
    program: Program,
    plan: OptimizerPlan,
    seconds: dict[str, float],
    recipe: Sequence[str],
    batch: Any,
    wishes: Wishes,
) -> Compiled:
    """The programs of a step whose updates wait for the next forward."""
    check_can_wait(plan)
    device, beside = device_of(step.model, step.loss_fn), step.options.updates == "beside_next_forward"
    if beside and device.type != "cuda":
        raise InputError(
            f'updates="beside_next_forward" needs a second stream, which {device.type} has not; '
            'compile with updates="in_next_forward"'
        )
    parts, laid = late_updates(program, beside), laid_by_step(program)
    others = Wishes(forbid=wishes.forbid)  # what is asked of kernels is asked of the program that runs again and again
    traced = Kernels(device)  # the programs have most of their calls in common
    first = made_ready(step, parts.first, plan, {}, recipe, batch, others, laid, traced)
    found = {} if first.static is None else kept_strides(first.static.plan, parts.first.slots)
    if found:
        first = made_ready(step, parts.first, plan, {}, recipe, batch, others, laid | found, traced)
    laid |= found
    update = made_ready(step, parts.update, plan, {}, recipe, batch, others, laid, traced)
    both = made_ready(step, parts.both, plan, seconds, recipe, batch, wishes, laid, traced)
    wishes.check(both.fusions)
    for each in (first, update):
        for name, spent in each.seconds.items():
            both.seconds[name] = both.seconds.get(name, 0.0) + spent
    parameters = [p for fqn, p in program.captured.parameters.items() if fqn in program.updated]
    both.kept = first.kept = update.kept = make_room(parts.both.slots, laid, step.kept_arena, device)
    first.hypers = both.hypers
    whole = Compiled(program, plan, device, host_numbers(program, step.optimizer), both.key, {})
    both.late = Late(whole, first, update, record(Subjects(counted=parameters)))
    if device.type == "cuda":
        both.long_way = None, "updates wait for the next forward"
    return both


def made_ready(
    step: TrainStep,
    program: Program,
    plan: OptimizerPlan,
    seconds: dict[str, float],
    recipe: Sequence[str],
    batch: Any,
    wishes: Wishes,
    laid: Mapping[tuple[Any, ...], tuple[int, ...]] | None = None,
    traced: Kernels | None = None,
) -> Compiled:
    """A program with its plan. laid: how arguments lie that the step lays out itself, if the program does not say.
    traced: ATen's kernels of other programs of the step."""
    start = time.perf_counter()
    device = device_of(step.model, step.loss_fn)
    numbers = host_numbers(program, step.optimizer)
    choices = choices_of(step, device)
    laid = laid_by_step(program) if laid is None else laid

    def plan_for(strides: list[Any]) -> Planned:
        return planned_function(
            program.function, device, numbers, strides, choices=choices, wishes=wishes, kernels=traced
        )

    static = None
    kernels = dict.fromkeys(("generate", "build", "measure"), 0.0) if choices is None else dict(choices.seconds)
    if step.options.level:
        strides = argument_strides(program, step, batch, laid)
        static = StaticStep(program.slots, numbers, device, strides, plan_for, step.arena)
        check_fits(static.plan, device)
    spent = {} if choices is None else {k: v - kernels[k] for k, v in choices.seconds.items()}
    seconds = {**seconds, "plan": time.perf_counter() - start - sum(spent.values()), **spent}
    return Compiled(program, plan, device, numbers, program_key(step, plan), seconds, recipe, static, laid)


def attentions_of(step: TrainStep, program: Program, device: torch.device) -> list[Decision]:
    """Which kernel runs each attention: fixed before anything is planned."""
    options, choices = step.options, choices_of(step, device)
    tune, lean = bool(options.tune) and options.level > 0, options.memory_budget is not None
    return choose_attentions(program.module, device, tune, lean, None if choices is None else choices.store)


def timing_of(
    step: TrainStep, program: Program, device: torch.device, wanted: bool
) -> tuple[Timing, LayoutClock | None]:
    """What layouts are decided by: measured times, unless nothing may be measured or nobody asks for layouts."""
    options = step.options
    insist = any(FIRST in (meant(pattern) or [FIRST]) for pattern in (*options.recipe, *options.force))
    # (only on CPUs was it measured that gradients and updates take less time so)
    lies = {} if device.type != "cpu" else {str(program.function.attributes["sym_name"]): laid_last(program, step)}
    if not options.tune or not options.level:
        return Timing(why_modelled="tune=False" if options.level else "level=0", lies=lies), None
    if not (wanted or insist or options.policy) or not any(map(is_convolution, program.module.walk())):
        return Timing(lies=lies), None
    if any(meant(pattern) == [FIRST] for pattern in options.forbid):
        return Timing(why_modelled="forbid= names it", lies=lies), None
    choices = choices_of(step, device)
    store = Store(fingerprint(device)) if choices is None or choices.store is None else choices.store
    patience = float("inf") if options.tune == "max" else PATIENCE.get(device.type, 0.0)
    clock = LayoutClock(device, store, choices, machine_of(device), patience, Bar())
    return Timing(clock, insist, lies=lies), clock


def laid_last(program: Program, step: TrainStep) -> frozenset[int]:
    """The arguments of a program that lie with channels as neighbours, and not row by row."""
    found = []
    for number, (slot, strides) in enumerate(
        zip(program.slots, argument_strides(program, step, None, {}), strict=True)
    ):
        shape = slot.type.shape
        if strides is not None and len(shape) > 2 and not same_places(shape, strides, row_major(shape)):
            found += [number] if is_laid_out(shape, strides, channels_last(len(shape))) else []
    return frozenset(found)


def choices_of(step: TrainStep, device: torch.device) -> Choices | None:
    """Who may run regions of this step; None where ATen runs every op."""
    options = step.options
    names = options.providers
    if names is None and (default := os.environ.get("WHOLESTEP_PROVIDERS")):
        names = tuple(n.strip() for n in default.split(",") if n.strip())
    if options.level < 2:
        return None
    named = [(provider, provider.absent()) for provider in providers_for(device, names)]
    providers = [provider for provider, lost in named if not lost]
    for lost in (*(lost for _, lost in named), why_nothing_is_fused(device, names)):
        if lost and lost not in step.lost:
            step.lost.add(lost)
            warnings.warn(lost, stacklevel=2)
    if all(p.name == "aten" for p in providers):
        return None
    if step.choices is None:
        step.choices = choices_for(device, providers, options.tune)
        step.choices.progress = Bar()
    return step.choices


def refuse_overlap(program: Program, step: TrainStep) -> None:
    """Raises where a parameter or buffer that the step writes shares some elements with another one.

    Eager code sees a write through the one in the other at once; a program reads each of them as it was before.
    """
    buffers = named_state(step.model, step.loss_fn)[1]
    tables: dict[str, Mapping[str, torch.Tensor]] = {"parameter": program.captured.parameters, "buffer": buffers}
    written = {r.slot.source for r in program.results if r.slot is not None}
    by_memory: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
    for slot in program.slots:
        tensor = tables.get(slot.kind, {}).get(slot.source[1]) if slot.kind in tables else None
        if tensor is not None and tensor.numel() and not tensor.is_meta:
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((slot, tensor))
    for group in by_memory.values():
        for i, (one, x) in enumerate(group):
            for other, y in group[:i]:
                if (one.source in written or other.source in written) and share_elements(x, y):
                    raise InputError(
                        f"{one.name} and {other.name} share some of their memory, and the step writes one of them: the "
                        "other would not see it as it does in eager PyTorch. Make one of them a clone"
                    )


def share_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one storage have elements in common, without being the same elements in the same order."""
    if (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype):
        return False
    spans = []
    for t in (x, y):
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    size = x.untyped_storage().nbytes()
    seen = torch.zeros(size, dtype=torch.bool)
    for t in (x, y):
        places = torch.arange(size // t.element_size()).as_strided(t.shape, t.stride(), t.storage_offset()).reshape(-1)
        bytes_of = (places.unsqueeze(1) * t.element_size() + torch.arange(t.element_size())).reshape(-1)
        if t is y:
            return bool(seen[bytes_of].any())
        seen[bytes_of] = True
    return False


def argument_strides(
    program: Program, step: TrainStep, batch: Any, laid: Mapping[tuple[Any, ...], tuple[int, ...]]
) -> list[tuple[int, ...] | None]:
    """How the arguments of a program lie in memory; None for row by row. State to come lies as its parameter does.

    laid: those that the step lays out itself.
    """
    captured = program.captured
    given = None if batch is None else flattened(batch)[0]
    buffers = named_state(step.model, step.loss_fn)[1]
    found: list[tuple[int, ...] | None] = []
    for slot in program.slots:
        tensor: Any = None
        if slot.kind == "parameter":
            tensor = captured.parameters[slot.source[1]]
        elif slot.kind == "constant":
            tensor = captured.constants[slot.source[1]]
        elif slot.kind == "buffer":
            tensor = buffers.get(slot.source[1])
        elif slot.kind in ("optimizer_state", "copy", "ema"):
            parameter = captured.parameters[slot.source[1]]
            held = step.optimizer.state.get(parameter, {}) if slot.kind == "optimizer_state" else {}
            tensor = held.get(slot.source[2], parameter) if slot.kind == "optimizer_state" else parameter
        elif slot.kind == "batch" and given is not None:
            dense = is_dense(tuple(given[slot.source[1]].shape), tuple(given[slot.source[1]].stride()))
            tensor = given[slot.source[1]] if dense else None
        fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == slot.type.shape
        found.append(tuple(tensor.stride()) if fits else None)
    return [laid.get(slot.source, strides) for slot, strides in zip(program.slots, found, strict=True)]


def host_numbers(program: Program, optimizer: torch.optim.Optimizer) -> list[int]:
    """Arguments that are single numbers on the host: hyper-parameters and the optimizer's own counters.

    Where an update may be skipped on the device, counters must live there too.
    """
    skipping = any(slot.kind == "scaler" for slot in program.slots)
    found = []
    for index, slot in enumerate(program.slots):
        if slot.kind in ("hyper", "fresh"):
            found.append(index)
        elif (
            slot.kind == "optimizer_state"
            and not skipping
            and not slot.type.shape
            and slot.type.element.text in ("f32", "f64")
        ):
            parameter = program.captured.parameters[slot.source[1]]
            state = optimizer.state.get(parameter, {}).get(slot.source[2])
            on_host = state.device.type == "cpu" if isinstance(state, torch.Tensor) else True
            if on_host and parameter.dim():
                found.append(index)
    return found


def program_key(step: TrainStep, plan: OptimizerPlan) -> Any:
    """What a program depends on beside its inputs: modes, frozen layers, the optimizer's structure."""
    roots = (step.model, step.loss_fn) if isinstance(step.loss_fn, nn.Module) else (step.model,)
    modules = [m for root in roots for m in root.modules()]
    parameters = [p for m in modules for p in m._parameters.values() if p is not None]
    buffers = [b for m in modules for b in m._buffers.values() if b is not None]
    return (
        tuple([m.training for m in modules]),
        tuple([(id(p), p.requires_grad, p.shape, p.dtype, p.device) for p in parameters]),
        tuple([(b.shape, b.dtype, b.device) for b in buffers]),
        plan.structure(),
        step.options.loss_scale,
    )


def device_of(model: nn.Module, loss_fn: Any = None) -> torch.device:
    """The one device that the model, and a loss that is a module, are on."""
    parameters, buffers, _ = named_state(model, loss_fn)
    devices: dict[torch.device, str] = {}
    for name, tensor in (*parameters.items(), *buffers.items()):
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise InputError(f"the model is spread over several devices ({shown}); move it to one with .to(...)")
    return next(iter(devices), torch.device("cpu"))


def as_batch(example: Any) -> Any:
    """A batch as the step keeps it: a mapping, or a tuple of parts."""
    if isinstance(example, Mapping):
        return dict(example)
    if isinstance(example, list | tuple):
        return tuple(example)
    return (example,)


def check_options(options: Options) -> None:
    """Everything that can be said of the options without a model."""
    policy = parse_precision(options.precision)
    if options.policy is not None:
        policy_named(options.policy)
    if options.loss_scale != Scaling() and policy.low is not F16:
        raise InputError('loss_scale= belongs to precision="fp16"; bf16 and fp32 need no loss scale')
    if options.verify and policy.low is not None:
        raise InputError(
            'verify=True compares with eager PyTorch to float32 accuracy; compile with precision="fp32" to verify, '
            "then choose a lower precision"
        )


def check_model(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Everything that can be said before capture: ownership, devices, hooks, NaN."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn must be callable or None, not {type(loss_fn).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    parameters, _, _ = named_state(model, loss_fn)
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InputError(f"parameter {name} has no shape yet (a lazy module); run the model once before compiling")
    if not any(p.requires_grad for p in parameters.values()):
        raise InputError("no parameter of the model requires a gradient; unfreeze one with requires_grad_(True)")
    check_ownership(parameters, optimizer)
    for name, p in parameters.items():
        check_parameter(name, p)
    for path, module in (*model.named_modules(), *(loss_fn.named_modules() if isinstance(loss_fn, nn.Module) else ())):
        if has_backward_hooks(module):
            raise InputError(
                f"module {path or type(module).__name__} has backward hooks, which a compiled step would not call; "
                "remove them (forward hooks are part of the program)"
            )
    device = device_of(model, loss_fn)
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    flatten(batch, tensors, names, "batch")
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.device != device:
            raise InputError(
                f"{name} is on {tensor.device} but the model is on {device}; move one of them with .to(...)"
            )
        if tensor.layout is not torch.strided:
            raise InputError(f"{name} has the layout {tensor.layout}; only dense tensors can be part of a batch")


def check_ownership(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold parameters of this model, and of no other."""
    owned = {id(p) for p in parameters.values()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in owned for p in held)
    if foreign:
        raise InputError(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the model's; build the optimizer "
            "from model.parameters() after the model is complete and on its device. A loss with parameters of its own "
            "is passed as the nn.Module that it is, or made a part of the model"
        )


def check_parameter(name: str, p: nn.Parameter) -> None:
    if has_gradient_hooks(p):
        raise InputError(
            f"parameter {name} has gradient hooks, which a compiled step would not call; remove them "
            "(clip_norm= and clip_value= clip inside the step)"
        )
    if p.is_meta:
        raise InputError(f"parameter {name} is on the meta device and has no values; materialise the model first")
    if not p.is_floating_point():
        return
    bad = ~torch.isfinite(p.detach()) if p.requires_grad else torch.isnan(p.detach())  # a frozen mask may hold -inf
    count = int(bad.sum())
    if count:
        raise InputError(
            f"parameter {name} holds {count} NaN or infinite values (of {p.numel()}) before the step is compiled; "
            "check its initialisation or the checkpoint it came from"
        )
