"""Runs PyTorch's own op samples (OpInfo) through capture, differentiation and execution, and judges what comes out.

Each sample is traced to the composite ATen calls that torch.export gives, imported by the real importer, differentiated
by us and compared with eager PyTorch and its autograd. `examine` sums the samples of one op up in a verdict.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from wholestep.capture import aten_nn, aten_pointwise, aten_shape  # noqa: F401  (they register their handlers)
from wholestep.capture.explain import explain
from wholestep.capture.importer import HANDLERS, Importer
from wholestep.capture.layerdrop import RandomBranches
from wholestep.capture.references import Ref, fresh
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.errors import WholestepError
from wholestep.ir import add_function, finish_function, module, verify
from wholestep.ir.core import Op, Value
from wholestep.ir.types import I64, TensorType
from wholestep.runtime.executor import Executable
from wholestep.training.autodiff import gradients
from wholestep.training.traced_vjp import VjpCache

#: samples per op that rules cover, and per op that they do not; WHOLESTEP_ALL_SAMPLES=1 runs every one
LIMITS = (6, 3)
ALL_SAMPLES = bool(os.environ.get("WHOLESTEP_ALL_SAMPLES"))

RULE, TRACED, REFUSED, WRONG = "rule", "traced", "refused", "wrong"

#: ops whose values mean nothing: memory as it was found
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
RANDOM_KEY = (12345, 678, 0)


@dataclass(slots=True)
class Outcome:
    """What one sample came to."""

    status: str
    reason: str = ""
    differentiated: bool = False
    random: bool = False


@dataclass(slots=True)
class Verdict:
    """What the samples of one op came to."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    not_applicable: str = ""
    handlers: set[str] = field(default_factory=set)

    def count(self, status: str) -> int:
        return sum(o.status == status for o in self.outcomes)

    @property
    def status(self) -> str:
        """`rule`, `traced`, `partly` (some samples refused), `refused`, `wrong` or `not applicable`."""
        if self.not_applicable:
            return "not applicable"
        if self.count(WRONG):
            return WRONG
        refused = self.count(REFUSED)
        if refused:
            return REFUSED if refused == len(self.outcomes) else "partly"
        return TRACED if self.count(TRACED) else RULE

    @property
    def reasons(self) -> list[str]:
        """Why samples were refused or wrong, or what made a sample leave the rules; each once, in order."""
        worst = self.status
        kinds = {RULE: (), TRACED: (TRACED,), "partly": (REFUSED,), REFUSED: (REFUSED,), WRONG: (WRONG,)}
        found = [o.reason for o in self.outcomes if o.status in kinds.get(worst, ())]
        return [self.not_applicable] if self.not_applicable else list(dict.fromkeys(found))


def title(info: Any) -> str:
    """The name of an op_db entry, unique among them."""
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


def database() -> list[Any]:
    """PyTorch's op samples, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return sorted(op_db, key=title)


def seed(number: int = 0) -> None:
    """Seeds the generators of the CPU; torch.manual_seed spends a millisecond on devices that are not there."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def spread(samples: Iterator[Any], limit: int) -> list[Any]:
    """Up to `limit` of the samples, evenly spread over the first two hundred."""
    if ALL_SAMPLES:
        return list(samples)
    # read to its end: a generator left half-way would restore the gradient mode when it is collected, inside a trace
    found = [sample for i, sample in enumerate(samples) if i < 200]
    if len(found) <= limit:
        return found
    return [found[round(i * (len(found) - 1) / max(1, limit - 1))] for i in range(limit)]


def examine(info: Any) -> Verdict:
    """All kinds of samples of one op: float64 with gradients, other element types, non-contiguous, in place."""
    verdict = Verdict(title(info))
    real = [t for t in (torch.float64, torch.float32, torch.int64, torch.bool) if t in info.dtypes]
    if not real:
        verdict.not_applicable = "takes complex tensors or special element types alone"
        return verdict
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, function, sample, differentiate in cases(info, real):
            case = Case(info, function, sample, differentiate)
            if case.skip:
                verdict.not_applicable = verdict.not_applicable or case.skip
                continue
            outcome = case.outcome()
            outcome.reason = f"{kind}: {outcome.reason}" if outcome.status == WRONG else outcome.reason
            verdict.outcomes.append(outcome)
            verdict.handlers |= case.handlers
    if verdict.outcomes:
        verdict.not_applicable = ""
    elif not verdict.not_applicable:
        verdict.not_applicable = "has no samples"
    return verdict


def by_rule(case: Case) -> bool:
    """Whether every call of a sample has a handler."""
    try:
        return all(name in HANDLERS for name in targets(case.trace()))
    except Exception:
        return False


def cases(info: Any, dtypes: list[torch.dtype]) -> Iterator[tuple[str, Callable[..., Any], Any, bool]]:
    """(what it is, the function, a sample, whether to differentiate)."""
    main, *others = dtypes
    grad = info.supports_autograd and main is torch.float64
    first = [Case(info, info.op, sample, False) for sample in samples_of(info, main, False, 2)[-1:]]
    curated = all(not case.skip and by_rule(case) for case in first)
    limit, few = LIMITS[not curated], 2 if curated else 1
    samples = samples_of(info, main, grad, limit)
    for i, sample in enumerate(samples):
        yield f"sample {i} in {main}", info.op, sample, grad
    for i, sample in enumerate(samples[:: max(1, len(samples) // few)][:few]):
        try:
            apart = sample.noncontiguous()
        except Exception:  # a layout that has no other strides
            continue
        yield f"non-contiguous sample {i} in {main}", info.op, apart, grad
    in_place = info.inplace_variant
    if in_place is not None:
        fit = [s for s in samples if isinstance(s.input, torch.Tensor) and not s.broadcasts_input]
        for i, sample in enumerate(fit[:few]):
            yield (
                f"in-place sample {i} in {main}",
                in_place_of(in_place),
                sample,
                grad and info.supports_inplace_autograd,
            )
    for dtype in others:
        for i, sample in enumerate(samples_of(info, dtype, False, few)):
            yield f"sample {i} in {dtype}", info.op, sample, False


def in_place_of(method: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place method as a function: it works on a view of a copy, and both are given back."""

    def function(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        base = x.clone()
        method(base.view_as(base), *args, **kwargs)
        return base

    return function


@contextlib.contextmanager
def quick_samples() -> Iterator[None]:
    """Samples without what takes longer than making them: generators of devices that are not there are not seeded, and
    torch does not search the whole stack, source lines and all, for the test that asks."""
    utils = "torch.testing._internal.common_utils"
    with (
        mock.patch(f"{utils}.set_rng_seed", lambda number=None: seed(number or 0)),
        mock.patch(f"{utils}.extract_test_fn", lambda: None),
    ):
        yield


def samples_of(info: Any, dtype: torch.dtype, grad: bool, limit: int) -> list[Any]:
    seed()
    try:
        with quick_samples():
            return spread(info.sample_inputs("cpu", dtype, requires_grad=grad), limit)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return []  # samples that cannot be made for this type here


class Case:
    """One sample: its tensors, what eager gives, and the program we make of it."""

    def __init__(self, info: Any, function: Callable[..., Any], sample: Any, differentiate: bool):
        self.info = info
        self.skip = ""
        self.handlers: set[str] = set()
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.tensors: list[torch.Tensor] = [t.detach() for t in leaves if isinstance(t, torch.Tensor)]
        self.wanted = [
            differentiate and t.requires_grad and t.dtype.is_floating_point
            for t in leaves
            if isinstance(t, torch.Tensor)
        ]
        self.rest = [None if isinstance(t, torch.Tensor) else t for t in leaves]
        self.places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)]
        self.function, self.process = function, sample.output_process_fn_grad
        if any(t.layout is not torch.strided or t.is_nested for t in self.tensors):
            self.skip = "sparse or nested tensors"
            return
        if any(t.dtype.is_complex for t in self.tensors):
            self.skip = "complex tensors"
            return
        self.expected: list[torch.Tensor] = []
        self.cotangents: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] = []
        try:
            self.run_eager()
        except Exception as error:
            self.skip = f"eager PyTorch itself refuses the sample ({type(error).__name__})"
            return
        if any(t.layout is not torch.strided for t in self.expected):
            self.skip = "sparse or nested tensors"

    def call(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The op's tensor results on these tensors."""
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        x, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        seed()
        out = self.process(self.function(x, *args, **kwargs))
        return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]

    def scalar(self, outs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> torch.Tensor:
        """One number of all results that carry a gradient."""
        given = iter(cotangents)
        parts = []
        for out in outs:
            if out.is_complex():
                parts.append((torch.view_as_real(out.resolve_conj()) * next(given)).sum())
            elif out.is_floating_point():
                parts.append((out * next(given)).sum().to(torch.float64))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def run_eager(self) -> None:
        leaves = [t.detach().requires_grad_(w) for t, w in zip(self.tensors, self.wanted, strict=True)]
        outs = self.call(leaves)
        self.expected = [t.detach() for t in outs]
        if not any(self.wanted) or not any(o.requires_grad for o in outs):
            self.wanted = [False] * len(self.wanted)
            return
        generator = torch.Generator().manual_seed(3)
        for out in outs:
            if out.is_complex():
                shape, dtype = (*out.shape, 2), out.real.dtype
            elif out.is_floating_point():
                shape, dtype = tuple(out.shape), out.dtype
            else:
                continue
            self.cotangents.append(torch.randn(shape, dtype=dtype, generator=generator))
        found = iter(
            torch.autograd.grad(
                self.scalar(outs, self.cotangents),
                [t for t, w in zip(leaves, self.wanted, strict=True) if w],
                allow_unused=True,
            )
        )
        self.gradients = [next(found) if w else None for w in self.wanted]

    def outcome(self) -> Outcome:
        try:
            graph = self.trace()
        except Exception as error:
            return Outcome(REFUSED, plain(str(explain(error, RandomBranches()))) or plain(repr(error)))
        try:
            return self.judge(*self.program(graph))
        except WholestepError as error:
            text = plain(str(error))
            return Outcome(WRONG if "internal error" in text else REFUSED, text)
        except Exception as error:
            return Outcome(WRONG, f"{type(error).__name__}: {plain(str(error))}")

    def trace(self) -> torch.fx.GraphModule:
        """The composite ATen calls of the op and of the scalar, as torch.export (non-strict) would give them."""
        count = len(self.tensors)

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            outs = self.call(list(tensors[:count]))
            return [*outs, self.scalar(outs, list(tensors[count:]))] if self.cotangents else outs

        leaves = [t.detach().requires_grad_(w) for t, w in zip(self.tensors, self.wanted, strict=True)]
        return trace(function, [*leaves, *self.cotangents])

    def program(self, graph: torch.fx.GraphModule) -> tuple[Op, Imported]:
        imported = import_function(graph, [*self.tensors, *self.cotangents])
        self.handlers |= {t for t in targets(graph) if t in HANDLERS}
        if self.cotangents:
            *outs, loss = imported.results
            wanted = [v for v, w in zip(imported.arguments, self.wanted, strict=False) if w]
            found = iter(gradients(imported.b, loss, wanted, imported.vjps))
            grads = [next(found) if w else None for w in self.wanted]
        else:
            outs, loss, grads = imported.results, None, []
        imported.finish([*outs, *([loss] if loss is not None else []), *(g for g in grads if g is not None)])
        imported.missing = [g is None for g in grads]
        return imported.root, imported

    def judge(self, root: Op, imported: Imported) -> Outcome:
        verify(root)
        run = Executable(imported.function)
        inputs = [*self.tensors, *self.cotangents, *imported.extra()]
        before = [t.clone() for t in inputs]
        results = run(inputs)
        if any(not same(old, new) for old, new in zip(before, inputs, strict=True)):
            return Outcome(WRONG, "an input was changed")
        opaque, traced = sorted(imported.importer.opaque_targets), sorted(imported.vjps.traced)
        status = TRACED if opaque or traced else RULE
        reason = ", ".join(dict.fromkeys(n.removeprefix("aten.") for n in (*opaque, *traced)))
        outcome = Outcome(status, reason, any(self.wanted), imported.importer.streams > 0)
        outs, rest = results[: len(self.expected)], results[len(self.expected) :]
        for i, (got, want) in enumerate(zip(outs, self.expected, strict=True)):
            problem = kinds_differ(got, want)
            if not problem and not outcome.random and self.info.name not in UNDEFINED:
                problem = differ(got, want)
            if problem:
                return Outcome(WRONG, f"result {i}: {problem}")
        if not outcome.differentiated:
            return outcome
        given = iter(rest[1:])
        for i, (want, wanted) in enumerate(zip(self.gradients, self.wanted, strict=True)):
            if not wanted:
                continue
            got = torch.zeros_like(self.tensors[i]) if imported.missing[i] else next(given)
            problem = differ(got, torch.zeros_like(self.tensors[i]) if want is None else want)
            if problem and outcome.random:
                return self.judge_by_differences(run, inputs, imported, outcome)
            if problem:
                return Outcome(WRONG, f"gradient of tensor {i}: {problem}")
        return outcome

    def judge_by_differences(self, run: Executable, inputs: list[Any], imported: Imported, outcome: Outcome) -> Outcome:
        """Random ops draw other numbers than eager: the gradient must be the slope of our own program, same key."""
        h = 1e-6
        place = len(self.expected)
        generator = torch.Generator().manual_seed(5)
        grads = iter(run(inputs)[place + 1 :])
        for i, wanted in enumerate(self.wanted):
            if not wanted:
                continue
            gradient = torch.zeros_like(self.tensors[i]) if imported.missing[i] else next(grads)
            direction = torch.randn(self.tensors[i].shape, dtype=torch.float64, generator=generator)
            ends = []
            for side in (h, -h):
                moved = list(inputs)
                moved[i] = inputs[i] + side * direction
                ends.append(run(moved)[place].item())
            slope, want = (gradient * direction).sum().item(), (ends[0] - ends[1]) / (2 * h)
            if abs(slope - want) > 1e-5 * max(1.0, abs(want)):
                return Outcome(WRONG, f"gradient of tensor {i}: {slope}, by differences {want}")
        return outcome


# ---- tracing and importing -------------------------------------------------------------------------------------------


def trace(function: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.fx.GraphModule:
    """A function's composite ATen calls, with views and in-place calls as they are."""
    with torch.enable_grad():
        return make_fx(function, pre_dispatch=True, tracing_mode="fake")(*tensors)


def targets(graph: torch.fx.GraphModule) -> list[str]:
    """The ATen overloads that a graph calls, such as `add.Tensor`."""
    names = [str(n.target) for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [n.removeprefix("aten.") for n in names]


@dataclass(slots=True)
class Imported:
    """A graph as a function of the step dialect, open at its end."""

    root: Op
    function: Op
    b: StepBuilder
    importer: Importer
    arguments: list[Value]
    results: list[Value]
    keys: list[Value]
    constants: list[torch.Tensor]
    vjps: VjpCache = field(default_factory=VjpCache)
    missing: list[bool] = field(default_factory=list)

    def finish(self, results: list[Value]) -> None:
        finish_function(self.function, results)

    def extra(self) -> list[torch.Tensor]:
        """Arguments beside the tensors: constants of the graph, and the random key where one is used."""
        return [*self.constants, *([torch.tensor(RANDOM_KEY)] * len(self.keys))]


def lift_constants(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Makes tensors that a graph holds inputs of it, as torch.export does; gives them in order."""
    found: dict[str, tuple[fx.Node, torch.Tensor]] = {}
    last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1:]
    for node in list(graph.graph.nodes):
        tensor = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 1:
            continue
        if node.target not in found:
            place = graph.graph.inserting_after(last[0]) if last else graph.graph.inserting_before()
            with place:
                argument = graph.graph.placeholder(f"constant_{len(found)}")
            argument.meta["val"] = node.meta.get("val", tensor)
            found[node.target] = (argument, tensor.detach())
            last = [argument]
        node.replace_all_uses_with(found[node.target][0])
        graph.graph.erase_node(node)
    return [tensor for _, tensor in found.values()]


def import_function(graph: torch.fx.GraphModule, tensors: list[torch.Tensor]) -> Imported:
    """A function of the tensors, made by the importer that capture uses."""
    constants = lift_constants(graph)
    root = module()
    function = add_function(root, "main", [tensor_type(t) for t in (*tensors, *constants)])
    block = function.regions[0].block
    arguments = list(block.arguments)
    keys: list[Value] = []

    def random_key() -> Value:
        if not keys:
            keys.append(block.add_argument(TensorType((3,), I64), "random key"))
        return keys[0]

    b = StepBuilder(block, phase="forward")
    importer = Importer(b, random_key)
    out = importer.run(graph, [fresh(a) for a in arguments])
    flat = out if isinstance(out, list) else [out]
    results = [r.read(b) for r in flat if isinstance(r, Ref)]
    b.phase = "backward"
    return Imported(root, function, b, importer, arguments, results, keys, constants)


# ---- comparing -------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """One line without addresses, paths or names that change from run to run."""
    if "(u0)" in text:  # a size that only the data tells, met by the sum of the results
        return "the shape of its result depends on the data"
    text = text.replace("\nTry:", "; try:")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = next((line for line in lines if line.startswith("cannot be captured")), lines[0] if lines else "")
    chosen = re.sub(r" in layer <[^>]*>| in layer [^:]*(?=:)| of layer \S+| at 0x[0-9a-f]+", "", chosen)
    return re.sub(r"\S*/\S+\.py:\d+ in \S+", "", chosen).strip()[:300]


def kinds_differ(got: torch.Tensor, want: torch.Tensor) -> str:
    if got.dtype is not want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    return ""


def same(old: torch.Tensor, new: torch.Tensor) -> bool:
    return bool(torch.equal(old, new) or not differ(new, old))


def differ(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> str:
    """How two tensors differ: float64 by more than 1e-9 relative, float32 by more than its rounding, others at all."""
    problem = kinds_differ(got, want)
    if problem or not want.numel():
        return problem
    if got.dtype.is_complex:
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
    if tolerance is None:
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(want.dtype, 1e-2)
    if not want.dtype.is_floating_point:
        wrong = got != want
        return f"{int(wrong.sum())} of {want.numel()} elements differ" if bool(wrong.any()) else ""
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)) or not torch.equal(want.isnan(), got.isnan()):
        return "NaN or infinity in other places"
    infinite = ~finite & ~want.isnan()
    if not torch.equal(want[infinite], got[infinite]):
        return "infinities of other signs"
    want, got = want[finite], got[finite]
    if not want.numel():
        return ""
    scale = want.abs().max().item()
    excess = (got - want).abs() - tolerance * want.abs() - tolerance * 0.1 * scale
    worst = excess.max().item()
    return f"off by {(got - want).abs().max().item():.3g} of {scale:.3g}" if worst > 0 else ""
