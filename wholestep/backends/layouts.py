"""How long ops and copies take in either layout on this machine: the clock that `transforms/layout.py` decides by.

An op is run alone, by ATen, on made-up tensors that lie row by row and on some with channels as neighbours. Unless it
is far slower row by row, it also runs with channels as neighbours as the product that it becomes on a GPU, and by other
providers, in the form that it has when a plan is made. Equal ops are timed once per machine: times are kept in the
store. What cannot be timed is said, and modelled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..dialects.step import StepBuilder, torch_dtype
from ..dialects.step.control import root_of
from ..dialects.strides import row_major, strides_in
from ..errors import WholestepError
from ..ir.core import Op
from ..ir.types import F32, TensorType
from ..machine.describe import memory_bytes
from ..machine.description import Description
from ..transforms import pointwise_convolution  # noqa: F401  (it registers)
from ..transforms.backward_forms import FORMS
from ..transforms.expand import has_expansion
from ..transforms.layout import as_images
from ..transforms.layout_prices import Move, Pair
from ..transforms.layout_rules import channels_last, differ, is_convolution, is_depthwise
from ..transforms.loops import is_primitive
from ..transforms.opportunity import take
from ..transforms.regions import Piece, body_of
from .about import about
from .choose import Choices
from .compare import first_line
from .generated import region_of
from .kernels import Spec
from .made_up import neutral_inputs
from .providers import Aten, Generator, Provider, Region
from .store import Choice, Store, Timed
from .timing import make_room, on_cpu, on_gpu
from .trial import empty

#: what is timed of an op, and of a copy
ROWS, LAST, COPY = "row by row", "channels-last", "copy"
#: who wins where nothing could be timed, and one reason for that
MODEL, TIME_IS_UP = "model", "the time for measuring layouts was up"
#: seconds that timing may take per compile: the lightest ops are modelled then
PATIENCE = {"cuda": 2.0, "cpu": 5.0}
#: bytes that are copied to see how fast memory is where no description says so, and as fast as it is taken for if that
#: fails; seconds that one more kernel takes
COPIED, BANDWIDTH, LAUNCH = 1 << 26, 4.2e12, 1.1e-6
#: by how many times an op is slower row by row where no product is tried instead, and no kernels of others
CLEAR, CLOSE = 5.0, 1.5
#: seconds that one op is timed for on a CPU
BRIEFLY = 0.01
#: the share of a host's memory that tensors may take
SHARE = 0.25

Times = dict[str, float]


@dataclass
class LayoutClock:
    """Times ops in both layouts, and copies between them; remembers, and asks the store first."""

    device: torch.device
    store: Store | None = None
    #: other providers than ATen
    choices: Choices | None = None
    description: Description | None = None
    #: seconds that may be spent
    patience: float = math.inf
    progress: Callable[[str, int, int], None] | None = None
    #: seconds that were spent, those of them that others need anyway (the first call, which loads libraries, and
    #: building our kernels), and how many things were measured and not just looked up
    seconds: float = 0.0
    shared: float = 0.0
    measured: int = 0
    #: True once a compile is over: nothing is timed any more
    closed: bool = False
    #: what could not be timed, in words, and why
    problems: dict[str, str] = field(default_factory=dict)
    known: dict[str, Pair | None] = field(default_factory=dict)
    copied: dict[Move, float | None] = field(default_factory=dict)
    forms: dict[Op, Region | None] = field(default_factory=dict)

    # ---- what is asked -----------------------------------------------------------------------------------------------

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second: as the machine is described, else by one copy."""
        if self.description is not None:
            return self.description.bandwidth
        move = Move(TensorType((COPIED // 4,), F32), (0,), (0,))
        found = self.times_of(f"layouts: {COPIED} bytes", "a plain copy", lambda: {COPY: self.time_move(move)})
        return BANDWIDTH if found is None else 2 * COPIED / found[COPY]

    @property
    def launch(self) -> float:
        known = self.description
        return LAUNCH if known is None else known.graph_launch_seconds or known.launch_seconds or LAUNCH

    def limit(self, op: Op) -> float:
        known = self.description
        if known is None:
            return math.inf
        rate = known.gemm.get(op.operands[0].type.element.text, math.inf)
        return max(sum(op.definition.bytes(op)) / known.bandwidth, op.definition.flops(op) / rate)  # type: ignore[attr-defined]

    def ops(self, cases: dict[str, Op]) -> dict[str, Pair | None]:
        new = [case for case in cases if case not in self.known and not self.closed]
        timed = [cases[case] for case in new if not self.is_kept(case, cases[case])]
        if self.choices is not None:  # compiled while the ops before them are timed
            self.choices.expect(filter(None, map(self.by_others, timed)))
        for done, case in enumerate(new, 1):
            self.known[case] = self.pair(case, cases[case])
            self.say(done, len(new))
        return {case: self.known.get(case) for case in cases}

    def moves(self, moves: Sequence[Move]) -> dict[Move, float | None]:
        new = [move for move in moves if move not in self.copied and not self.closed]
        for done, move in enumerate(new, 1):
            words = f"a copy of {move.type.text} from {list(move.source)} to {list(move.target)}"
            found = self.times_of(f"layouts: {words}", words, lambda m=move: {COPY: self.time_move(m)})  # type: ignore[misc]
            self.copied[move] = None if found is None else found[COPY]
            self.say(done, len(new))
        return {move: self.copied.get(move) for move in moves}

    def say(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress("timing layouts", done, total)

    def close(self) -> float:
        """Nothing is timed any more, and what operands took is the step's again; the seconds that were spent."""
        self.closed = True
        self.forms.clear()
        if self.device.type == "cuda" and self.measured:
            torch.cuda.empty_cache()
        return self.seconds

    # ---- one of them -------------------------------------------------------------------------------------------------

    def pair(self, case: str, op: Op) -> Pair | None:
        """Seconds of an op in either layout."""
        if self.leaves(op):
            return None
        rows = region_in(op, False, self.device)
        found = self.times_of(self.key(case, op), about(rows), lambda: self.time_op(op, rows))
        return None if found is None else (found[ROWS], found[LAST])

    def key(self, case: str, op: Op) -> str:
        """What an op's times are kept under."""
        return (
            f"layouts, products without a bias: {case} {mode(self.device)} {'+'.join(p.name for p in self.others(op))}"
        )

    def is_kept(self, case: str, op: Op) -> bool:
        """Whether an op is not timed, now or ever."""
        return self.leaves(op) or (self.store is not None and self.store.get(self.key(case, op)) is not None)

    def others(self, op: Op) -> list[Provider]:
        """The providers, where somebody among them has kernels for an op."""
        return [] if self.choices is None or self.by_others(op) is None else self.choices.providers

    def by_others(self, op: Op) -> Region | None:
        """An op with channels as neighbours as others than ATen have kernels for it; None where nobody has."""
        if op not in self.forms:
            self.forms[op] = self.form_for_others(op)
        return self.forms[op]

    def form_for_others(self, op: Op) -> Region | None:
        if self.choices is None:
            return None
        if self.device.type == "cuda" and is_convolution(op):
            if region_as_product(op, self.device) is not None:  # the libraries'
                return None
            region = region_as_planned(op, self.device)
        else:
            region = region_in(op, True, self.device)
        alone = self.choices.measure and any(self.choices.runs_alone(each.name) for each in region.ops)
        return region if alone or any(map(self.choices.takes, region.ops)) else None

    def leaves(self, op: Op) -> bool:
        """Whether an op is not timed: cuDNN compiles a kernel for every size of a depthwise convolution, which takes
        long, and what is no convolution and has a loop form is part of a generated kernel."""
        if is_convolution(op):
            return self.device.type == "cuda" and is_depthwise(op)
        generates = self.choices is not None and any(isinstance(p, Generator) for p in self.choices.providers)
        return generates and (is_primitive(op) or has_expansion(op))

    def times_of(self, key: str, words: str, measure: Callable[[], Times]) -> Times | None:
        """What was measured before, or is now; None where that is not to be had."""
        kept = None if self.store is None else self.store.get(key)
        if kept is not None and (kept.winner != MODEL or kept.about != TIME_IS_UP or self.patience < math.inf):
            if kept.winner == MODEL:
                self.problems[words] = kept.about
            return None if kept.winner == MODEL else {t.name: t.seconds for t in kept.candidates}
        found, why = None, TIME_IS_UP
        if self.seconds - self.shared < self.patience:
            found, why = self.attempt(measure)
        if found is None:
            self.problems[words] = why
        if self.store is not None and not why.startswith("out of memory"):  # (there may be room the next time)
            self.store.put(key, choice_of(found, words, why))
        return found

    def attempt(self, measure: Callable[[], Times]) -> tuple[Times | None, str]:
        """Times, or why there are none: one op's failure is no reason to stop, unless the device answers no more."""
        start = time.perf_counter()
        self.measured += 1
        try:
            with torch.no_grad():
                return measure(), ""
        except (torch.OutOfMemoryError, MemoryError):
            return None, "out of memory"
        except WholestepError:  # a kernel of ours broke the device
            raise
        except Exception as error:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return None, f"it crashed: {first_line(error)}"
        finally:
            spent = time.perf_counter() - start
            self.seconds += spent
            self.shared = spent if self.measured == 1 else self.shared

    def time_op(self, op: Op, rows: Region) -> Times:
        """Seconds by the best way of each layout. With channels as neighbours ATen's product is tried unless its op
        wins clearly, and kernels of others, which have to be compiled, where the other layout comes close."""
        last = region_in(op, True, self.device)
        best = self.time_region(last)
        other = self.time_region(rows, best)
        product = region_as_product(op, self.device) if other < CLEAR * best and self.device.type == "cuda" else None
        if product is not None:
            best = min(best, self.time_region(product, best))
        own = self.by_others(op) if other < CLOSE * best else None
        if self.choices is not None and own is not None:
            before = self.choices.seconds["build"]
            best = min(best, *self.choices.times([own]))
            self.shared += self.choices.seconds["build"] - before
        return {ROWS: other, LAST: best}

    def time_region(self, region: Region, to_beat: float = math.inf) -> float:
        """Seconds of a region by ATen. Its tensors are all the memory that is taken."""
        self.make_room(region.bytes)
        run = Aten().launcher(region)
        tensors = [*neutral_inputs(region, False), *(empty(spec, self.device) for spec in region.results)]
        return self.time_call(lambda: run(*tensors), to_beat)

    def time_move(self, move: Move) -> float:
        self.make_room(2 * move.type.bytes)
        shape, dtype = move.type.shape, torch_dtype(move.type.element)
        here, there = (
            torch.empty_strided(shape, strides_in(shape, order), dtype=dtype, device=self.device).zero_()
            for order in (move.source, move.target)
        )
        return self.time_call(lambda: there.copy_(here))

    def make_room(self, size: int) -> None:
        """Raises MemoryError where a host would not tell in time."""
        if self.device.type == "cuda":
            make_room(self.device)
        elif size > SHARE * (memory_bytes() or math.inf):
            raise MemoryError(f"{size:,} bytes")

    def time_call(self, call: Callable[[], object], to_beat: float = math.inf) -> float:
        if self.stream is not None:
            return on_gpu(call, self.device, to_beat, self.stream)
        start = time.perf_counter()
        call()  # a first call makes what later ones find
        return on_cpu(call, to_beat, time.perf_counter() - start, BRIEFLY)

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """One for all, since memory that ops take is kept per stream."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None


def choice_of(found: Times | None, words: str, why: str) -> Choice:
    """A row of the store: who won and all times, or that the model has to do and why."""
    if found is None:
        return Choice(MODEL, 0.0, about=why)
    winner = min(found, key=lambda name: found[name])
    return Choice(winner, found[winner], [Timed(*each) for each in found.items()], whole=True, about=words)


def mode(device: torch.device) -> str:
    """Settings of PyTorch's that change which kernel of a library runs."""
    if device.type != "cuda":
        return ""
    cudnn, exact = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    return f"{cudnn.enabled} {cudnn.benchmark} {cudnn.deterministic or exact} {cudnn.conv.fp32_precision}"


# ---- an op alone -----------------------------------------------------------------------------------------------------


def function_of(op: Op) -> Op:
    """A function that does what one op does."""
    return body_of(Piece([op], list(dict.fromkeys(op.operands)), [r for r in op.results if r.uses]))


def region_in(op: Op, last: bool, device: torch.device) -> Region:
    """An op by itself, on tensors with channels as neighbours (sequences become images of one row) or row by row."""
    function = function_of(on_images(op) if last else op)
    return region_of(function, None, operands_of(function, last), device)


def on_images(op: Op) -> Op:
    """An op on sequences as one on images of one row, without views of what it reads and makes as sequences: the result
    of a view would lie row by row, which is a copy."""
    if op.operands[0].type.rank != 3:
        return op
    block = function_of(op).regions[0].block
    as_images(next(iter(block)))
    (own,) = (each for each in block if each.name == op.name)
    return own


def operands_of(function: Op, last: bool) -> list[Spec]:
    """How the operands of a function lie."""
    found = []
    for value in function.regions[0].block.arguments:
        shape, rank = value.type.shape, value.type.rank
        image = last and rank >= 3 and differ(shape, tuple(range(rank)), channels_last(rank))
        strides = strides_in(shape, channels_last(rank)) if image else row_major(shape)
        found.append(Spec(shape, strides, torch_dtype(value.type.element)))
    return found


def region_as_product(op: Op, device: torch.device) -> Region | None:
    """A convolution with channels as neighbours as the product that `pointwise_convolution` makes of it, without its
    bias, which a kernel beside it adds; None where it is no product."""
    if not is_convolution(op):
        return None
    function = known_to_be_last(op)
    if take(root_of(function), ["bias_apart"]):
        (product,) = (each for each in function.regions[0].block if is_convolution(each))
        function = known_to_be_last(product)
    if not take(root_of(function), ["pointwise_convolution"]):
        return None
    for each in list(function.regions[0].block):
        if each.name == "step.layout":
            each.result.replace_by(each.x)
            each.erase()
    return region_of(function, None, operands_of(function, True), device)


def region_as_planned(op: Op, device: torch.device) -> Region:
    """A convolution with channels as neighbours as it is when a plan is made: on images, its bias apart, an input
    gradient as a convolution."""
    function = known_to_be_last(op)
    take(root_of(function), FORMS)
    found = [each for each in function.regions[0].block if is_convolution(each)]
    if len(found) != 1:  # (such as none, where it is a product of some of the pixels)
        return region_in(op, True, device)
    alone = function_of(found[0])
    return region_of(alone, None, operands_of(alone, True), device)


def known_to_be_last(op: Op) -> Op:
    """A function of one convolution whose images are said to have channels as neighbours."""
    function = function_of(on_images(op))
    block = function.regions[0].block
    own = next(iter(block))
    b = StepBuilder(block, own, own.loc, own.phase)
    images = [v for v in own.operands if v.type.rank >= 4]
    layouts = {v: b.layout(v, order=channels_last(v.type.rank)) for v in dict.fromkeys(images)}
    own.set_operands([layouts.get(v, v) for v in own.operands])
    return function
