"""Pooling windows as loops: what a window sees, and which windows see an element.

A window of few elements is written out, so that a kernel reads what lies under it and walks nothing but its results;
a larger one is walked. Of a gradient each element asks the few windows that may have seen it: nothing is scattered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...ir.core import Op, Value
from ...ir.types import BOOL, I32, I64, ScalarType, TensorType
from ..loop import compute_type
from .convolution import padded, under

#: windows of up to so many elements are written out
WRITTEN_OUT = 27
#: windows of up to so many elements have a position that fits into one byte
ONE_BYTE = 256


def split(op: Op, index: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The index of an element before its spatial dimensions, and along them."""
    lead = len(index) - len(op.kernel)
    return list(index[:lead]), list(index[lead:])


def dilation(op: Op) -> tuple[int, ...]:
    return op.attributes.get("dilation") or (1,) * len(op.kernel)


def seen(k, op: Op, places: Sequence[Any], taps: Sequence[int]) -> list[Any]:
    """Where the element of a window lies that has this number along each dimension."""
    each = zip(places, taps, op.stride, op.padding, dilation(op), strict=True)
    return [k.shifted(k.anywhere(k.scaled(place, s)), tap * d - p) for place, tap, s, p, d in each]


def inside(k, places: Sequence[Any], shape: Sequence[int]) -> Any:
    found: Any = True
    for place, size in zip(places, shape, strict=True):
        found = k.both(found, k.between(place, 0, size))
    return found


# ---- average ---------------------------------------------------------------------------------------------------------


def average(k, op: Op, index: Sequence[Any]):
    """The mean of a window."""
    lead, places = split(op, index)
    element = op.y.type.element
    if math.prod(op.kernel) <= WRITTEN_OUT:
        taps = itertools.product(*map(range, op.kernel))
        numbers = [padded(k, op.x, [*lead, *seen(k, op, places, tap)]) for tap in taps]
        total = added(k, numbers, element)
    else:
        walked = [k.walk(size) for size in op.kernel]
        spots = [under(k, *each) for each in zip(places, walked, op.stride, op.padding, strict=True)]
        total = k.reduce(padded(k, op.x, [*lead, *spots]), "sum", walked, index, element)
    return k.apply("div", total, divisor(k, op, places, op.x.type, op.y.type), dtype=element)


def average_gradient(k, op: Op, index: Sequence[Any]):
    """dx of average pooling: what each window that sees an element gives to all of its own."""
    lead, places = split(op, index)
    element, parts = op.dx.type.element, []
    for windows, _, sees in over(k, op, places, op.dy.type.shape[len(lead) :]):
        given = padded(k, op.dy, [*lead, *windows], sees)
        parts.append(
            k.apply("div", given, divisor(k, op, windows, op.dx.type, op.dy.type), dtype=compute_type(element))
        )
    return rounded(k, added(k, parts, element), element)


def adaptive_gradient(k, op: Op, index: Sequence[Any]):
    """dx of adaptive average pooling: of n into m, window i sees the elements from i n / m to (i + 1) n / m."""
    lead = len(index) - len(op.size)
    element = op.dx.type.element
    wide, dims = compute_type(element), []
    for place, n, m in zip(index[lead:], op.input_shape[lead:], op.size, strict=True):
        if n % m == 0:
            dims.append([(k.divided(place, n // m)[0], k.constant(n // m, I64), True)])
            continue
        first, found = k.divided(k.scaled(place, m), n)[0], []
        for further in range(-(-m // n) + 1):
            window = k.shifted(first, further)
            start = k.divided(k.scaled(window, n), m)[0]
            end = k.divided(k.shifted(k.scaled(window, n), n + m - 1), m)[0]
            width = k.apply("sub", k.as_number(end), k.as_number(start), dtype=I64)
            begun = k.apply("le", k.as_number(start), k.as_number(place), dtype=BOOL)
            found.append((window, width, begun if further else True))
        dims.append(found)
    parts = []
    for combination in itertools.product(*dims):
        sees: Any = True
        count = None
        for _, width, here in combination:
            sees = k.both(sees, here)
            count = width if count is None else k.apply("mul", count, width, dtype=I64)
        given = padded(k, op.dy, [*index[:lead], *(window for window, _, _ in combination)], sees)
        parts.append(k.apply("div", given, k.apply("cast", count, dtype=wide), dtype=wide))
    return rounded(k, added(k, parts, element), element)


def divisor(k, op: Op, places: Sequence[Any], x: TensorType, y: TensorType):
    """What the sum of a window is divided by: how many of its elements, or those of its padding too, there are."""
    wide, lead = compute_type(x.element), x.rank - len(places)
    if op.divisor_override is not None:
        return k.constant(op.divisor_override, wide)
    fixed, numbers = 1, []
    each = zip(places, x.shape[lead:], y.shape[lead:], op.kernel, op.stride, op.padding, strict=True)
    for place, size, windows, kernel, s, p in each:
        border = p if op.count_include_pad else 0
        if p <= border and (windows - 1) * s - p + kernel <= size + border:  # each of them is full
            fixed *= kernel
            continue
        first = k.shifted(k.scaled(place, s), -p)
        limits = [k.constant(n, I64) for n in (size + border, -border)]
        last = k.apply("minimum", k.as_number(k.shifted(first, kernel)), limits[0], dtype=I64)
        start = k.apply("maximum", k.as_number(first), limits[1], dtype=I64)
        numbers.append(k.apply("sub", last, start, dtype=I64))
    count = None
    for number in numbers:
        count = number if count is None else k.apply("mul", count, number, dtype=I64)
    if count is None:
        return k.constant(fixed, wide)
    # a window that nobody asks for may count nothing
    count = k.apply("maximum", count, k.constant(1, I64), dtype=I64)
    count = k.apply("cast", count, dtype=wide)
    return count if fixed == 1 else k.apply("mul", count, k.constant(fixed, wide), dtype=wide)


def added(k, numbers: Sequence[Value], element: ScalarType) -> Value:
    """A sum in the type that sums of a type are kept in. Of nothing where strides pass over the element asked for."""
    wide = compute_type(element)
    total = rounded(k, numbers[0], wide) if numbers else k.constant(0, wide)
    for number in numbers[1:]:
        total = k.apply("add", total, rounded(k, number, wide), dtype=wide)
    return total


def rounded(k, number: Value, element: ScalarType) -> Value:
    return number if number.type is element else k.apply("cast", number, dtype=element)


# ---- max -------------------------------------------------------------------------------------------------------------


def contest(k, op: Op, index: Sequence[Any], flat: bool) -> tuple[Value, Value]:
    """The largest element of a window and its position, counted through x if `flat`, else through the window.

    The first of equals wins, and the last that is no number wins over all, as in PyTorch.
    """
    if math.prod(op.kernel) > WRITTEN_OUT:
        k.refuse(f"a window of {math.prod(op.kernel)} elements is too much to be written out")
    lead, places = split(op, index)
    element, shape = op.x.type.element, op.x.type.shape[len(lead) :]
    best = k.constant(lowest(element), element)
    winner = number_of(k, op, places, [first_inside(k, op, d, place) for d, place in enumerate(places)], shape, flat)
    for tap in itertools.product(*map(range, op.kernel)):
        spots = seen(k, op, places, tap)
        there = inside(k, spots, shape)
        if there is False:
            continue
        number = k.at(op.x, [*lead, *spots])
        wins: Any = k.apply("gt", number, best, dtype=BOOL)
        if element.kind == "float":
            wins = k.apply("bit_or", wins, k.apply("isnan", number, dtype=BOOL), dtype=BOOL)
        wins = k.both(there, wins)
        best = k.choose(wins, number, best)
        winner = k.choose(wins, number_of(k, op, places, tap, shape, flat), winner)
    return best, winner


def lowest(element: ScalarType) -> float | int:
    if element.kind == "float":
        return -math.inf
    return 0 if element.text.startswith("ui") else -(2 ** (element.bits - 1))


def first_inside(k, op: Op, dim: int, place: Any) -> Any:
    """The number, along one dimension, of the first element of a window that is not padding: an int or a place."""
    start = k.shifted(k.scaled(place, op.stride[dim]), -op.padding[dim])
    if k.below(start, 0) is False:
        return 0
    d = dilation(op)[dim]
    missing = k.apply("sub", k.constant(d - 1, I64), k.as_number(start), dtype=I64)
    skipped = k.apply("floor_div", missing, k.constant(d, I64), dtype=I64)
    return k.apply("maximum", skipped, k.constant(0, I64), dtype=I64)


def number_of(k, op: Op, places: Sequence[Any], taps: Sequence[Any], shape: Sequence[int], flat: bool) -> Value:
    """The position of an element of a window as one number; in the window that is a small one."""
    fixed, total = 0, None
    sizes = shape if flat else op.kernel
    for dim, (place, tap, step) in enumerate(zip(places, taps, dilation(op), strict=True)):
        weight = math.prod(sizes[dim + 1 :])
        numbers = []
        if isinstance(tap, int):
            fixed += tap * weight * (step if flat else 1)
        else:
            numbers.append(times(k, tap, weight * (step if flat else 1)))
        if flat:
            start = k.shifted(k.scaled(place, op.stride[dim]), -op.padding[dim])
            numbers.append(times(k, k.as_number(start), weight))
        for number in numbers:
            total = number if total is None else k.apply("add", total, number, dtype=I64)
    if total is None:
        return k.constant(fixed, I64 if flat else I32)
    if fixed:
        total = k.apply("add", total, k.constant(fixed, I64), dtype=I64)
    return total if flat else rounded(k, total, I32)


def times(k, number: Value, factor: int) -> Value:
    return number if factor == 1 else k.apply("mul", number, k.constant(factor, I64), dtype=I64)


def max_gradient(k, op: Op, index: Sequence[Any]):
    """dx of max pooling: what the windows give that an element has won."""
    lead, places = split(op, index)
    element, flat = op.dx.type.element, op.indices.type.element is I64
    own = k.linear(places, op.input_shape[len(lead) :]) if flat else None
    zero, parts = k.constant(0, element), []
    for windows, taps, sees in over(k, op, places, op.dy.type.shape[len(lead) :]):
        winner = rounded(k, padded(k, op.indices, [*lead, *windows]), I64 if flat else I32)
        mine = own if own is not None else number_of(k, op, places, taps, (), False)
        won = k.both(k.apply("eq", winner, mine, dtype=BOOL), True if flat else sees)
        parts.append(k.choose(won, padded(k, op.dy, [*lead, *windows]), zero))
    return rounded(k, added(k, parts, element), element)


# ---- windows over an element -----------------------------------------------------------------------------------------


def over(k, op: Op, places: Sequence[Any], windows: Sequence[int]) -> Iterator[tuple[list[Any], list[Any], Any]]:
    """Every window that may see an element: its place, the element's number in it per dimension, whether it does.

    A place may lie outside of the windows that there are. A number is an int, or a number of the kernel.
    """
    each = zip(places, windows, op.kernel, op.stride, op.padding, dilation(op), strict=True)
    dims = [list(along(k, *one)) for one in each]
    if math.prod(map(len, dims)) > WRITTEN_OUT:
        k.refuse(f"an element is seen by {math.prod(map(len, dims))} windows, too many to be written out")
    for combination in itertools.product(*dims):
        sees: Any = True
        for _, _, here in combination:
            sees = k.both(sees, here)
        if sees is not False:
            yield [c[0] for c in combination], [c[1] for c in combination], sees


def along(
    k, place: Any, count: int, kernel: int, stride: int, padding: int, step: int
) -> Iterator[tuple[Any, Any, Any]]:
    """The windows of one dimension that may see an element."""
    place = k.shifted(place, padding)
    if count > 1 and stride == 1:
        for tap in range(kernel):
            yield k.shifted(place, -tap * step), tap, True
        return
    if count == 1:
        last, rest, most = k.nowhere, place, 1
    else:
        last, rest = k.divided(place, stride)
        most = -(-((kernel - 1) * step + 1) // stride)
    for back in range(most):
        tap, exact = k.shifted(rest, back * stride), True
        if step > 1:
            tap, exact = k.quotient(tap, step)
        sure = count > 1 and step == 1 and (back + 1) * stride <= kernel
        yield k.shifted(last, -back), k.as_number(tap), k.both(exact, True if sure else k.below(tap, kernel))
