"""The kinds of calls that a bound plan is a list of, beside plain functions with their arguments.

A call may look numbers up when it runs, copy what a library made elsewhere, choose, or run on a stream of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.kernels import replaced
from ..dialects.strides import is_dense
from ..errors import WholestepError
from ..plan.plan import Launch
from ..torch_private import cpu_allocations, foreach_copy
from .allocated import Allocated

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

#: elements of tensors that a GPU copies together: larger ones are copied faster one by one
TOGETHER = 1 << 21
#: bytes that a GPU moves at once
WORD = 16


@dataclass(frozen=True, slots=True)
class HostValue:
    """A number of the host, where an argument of a call is one."""

    buffer: int


class Late:
    """A call with numbers of the host among its arguments: they are looked up when it runs."""

    __slots__ = ("args", "call", "kwargs", "values")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]):
        self.call, self.args, self.kwargs, self.values = call, args, kwargs, values

    def __call__(self) -> None:
        values = self.values

        def now(value: Any) -> Any:
            return values[value.buffer] if type(value) is HostValue else value

        self.call(*[replaced(a, now) for a in self.args], **{k: replaced(v, now) for k, v in self.kwargs.items()})


class Made:
    """A call that makes its results itself: they are copied to their places."""

    __slots__ = ("call", "outs")

    def __init__(self, call: Callable[..., Any], outs: tuple[torch.Tensor | None, ...]):
        self.call, self.outs = call, outs

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        made = self.call(*args, **kwargs)
        outs: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for out, value in zip(self.outs, made if isinstance(made, list | tuple) else (made,), strict=True):
            if out is not None and value is not None:
                if out.shape != value.shape:
                    raise WholestepError(f"{self.call} gives {list(value.shape)} where {list(out.shape)} was planned")
                if out.is_cuda and out.numel() <= TOGETHER and len(self.outs) > 1:
                    outs.append(out)
                    values.append(value)
                elif out.is_cuda and out.dtype == value.dtype and not is_dense(out.shape, out.stride()):
                    wide, words = in_words(out), in_words(value)
                    if wide is not None and words is not None:
                        wide.copy_(words)
                    else:
                        out.copy_(value)
                else:
                    out.copy_(value)
        if len(outs) == 1:  # of one tensor foreach takes longer
            outs[0].copy_(values[0])
        else:
            foreach_copy(outs, values)


def in_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor as words of 16 bytes, which a GPU copies faster than single elements; None where it is no such words.

    Between tensors that fill their memory alike that makes no difference: those are copied as one stretch.
    """
    count = WORD // tensor.element_size()
    *outer, last = tensor.stride() or (0,)
    if last != 1 or tensor.shape[-1] % count or tensor.data_ptr() % WORD or any(s % count for s in outer):
        return None
    return tensor.view(torch.complex128)


class Watched:
    """A call of an operator that is given the tensors to write, in the first step: some operators lay such a tensor out
    anew, or give it other memory, while all others read where it lay. Then its values are copied back at every step."""

    __slots__ = ("anew", "call", "places", "where")

    def __init__(self, call: Callable[..., Any], outs: Sequence[torch.Tensor], where: str):
        self.call, self.where = call, where
        #: the tensors, and others that stay where those were
        self.places = [(t, t.as_strided(t.shape, t.stride(), t.storage_offset())) for t in outs if t.numel()]
        self.anew = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.call(*args, **kwargs)
        for out, place in self.places:
            if same_memory(out, place):
                continue
            values = out.clone()
            out.set_(place)  # type: ignore[arg-type]
            out.copy_(values)
            if not self.anew:
                self.anew = True
                warnings.warn(
                    f"{self.where} does not leave its result where it is told to: it is copied there at every step. "
                    "The numbers are right; please report the operator's name",
                    stacklevel=2,
                )


class Counted:
    """A call of a provider's kernel on a CPU, in the first step: notes what torch's allocator hands out meanwhile."""

    __slots__ = ("allocated", "call", "launch")

    def __init__(self, call: Callable[..., Any], launch: Launch, allocated: Allocated):
        self.call, self.launch, self.allocated = call, launch, allocated

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        sizes: list[int] = []
        with cpu_allocations(sizes):
            self.call(*args, **kwargs)
        self.allocated.note(self.launch, sum(size for size in sizes if size > 0), sum(sizes))


def settled(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call as it is after the first step: watched no more where it wrote what it was given, and not counted."""
    if isinstance(call, Watched):
        return call if call.anew else call.call
    if isinstance(call, Counted):
        return call.call
    if isinstance(call, Late):
        call.call = settled(call.call)
    elif isinstance(call, Beside):
        call.calls = [(settled(inner), args, kwargs) for inner, args, kwargs in call.calls]
    return call


class Choice:
    """Copies one of two tensors, by a number of the host; nothing where the one chosen lies in its place already."""

    __slots__ = ("condition", "moves", "values")

    def __init__(self, values: list[Any], condition: int, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor):
        self.values, self.condition = values, condition
        self.moves = [None if same_memory(source, out) else (out, source) for source in (y, x)]

    def __call__(self) -> None:
        move = self.moves[bool(self.values[self.condition])]
        if move is not None:
            move[0].copy_(move[1])


class Beside:
    """The calls of one launch on a stream of its own, after all that the stream of the kernels has been given so far.
    In a graph that is captured they are a branch, which the wait for them joins again."""

    __slots__ = ("calls", "over", "started", "stream")

    def __init__(self, calls: list[Call], stream: torch.cuda.Stream):
        self.calls, self.stream = calls, stream
        self.started, self.over = torch.cuda.Event(), torch.cuda.Event()

    def __call__(self) -> None:
        self.started.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self.started)
        with torch.cuda.stream(self.stream):
            for call, args, kwargs in self.calls:
                call(*args, **kwargs)
            self.over.record(self.stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(self.over)


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same places."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and all(a == b or n == 1 for n, a, b in zip(one.shape, one.stride(), other.stride(), strict=True))
        and one.device == other.device
    )
