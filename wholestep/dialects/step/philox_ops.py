"""The formula of philox.py as step ops on 64-bit integers: what `step.random` expands to, for code generators to read.

Integer multiplication wraps, floor division by a power of two shifts, and only the lower 32 bits of a word count.
"""

from __future__ import annotations

import math

from ...ir.core import Op, Value
from ...ir.types import F32, F64, I64, ScalarType, TensorType
from .base import StepBuilder, torch_dtype
from .philox import KEY_STEPS, LOW, MULTIPLIERS, ROUNDS, digits, words_per_element


def expand_random(b: StepBuilder, op: Op) -> Value:
    """The numbers of a random op."""
    type: TensorType = op.type
    if not type.size:
        return b.full(0.0, type.shape, type.element)
    element = F64 if type.element is F64 else F32
    words = philox_words(
        b,
        op.key,
        op.stream if op.number is None else op.number,
        -(-type.size * words_per_element(torch_dtype(type.element)) // 4),
    )
    if op.distribution == "uniform":
        numbers = fractions(b, words, type.element)
    elif op.distribution == "exponential":
        numbers = b.neg(b.log(fractions(b, words, element, inner=True)))
    else:
        numbers = box_muller(b, fractions(b, words, element, inner=True))
    return b.reshape_to(b.cast_to(part(b, numbers, 0, type.size), type.element), type.shape)


def philox_words(b: StepBuilder, key: Value, stream: int | Value, blocks: int) -> Value:
    """The words of the first blocks of a stream, each in 64 bits, as one vector."""
    seed, step, micro_batch = (b.reshape_to(part(b, key, i, i + 1), ()) for i in range(3))
    keys = [low(b, seed), low(b, high(b, seed))]
    x: Value = b.iota(start=0, stride=1, type=TensorType((blocks,), I64))
    y: Value = stream if isinstance(stream, Value) else b.full(stream, (), I64)
    z, w = low(b, step), b.add(micro_batch, b.mul(high(b, step), 1 << 16))
    for _ in range(ROUNDS):
        p, q = b.mul(x, MULTIPLIERS[0]), b.mul(z, MULTIPLIERS[1])
        x = low(b, b.bit_xor(b.bit_xor(high(b, q), y), keys[0]))
        z = low(b, b.bit_xor(b.bit_xor(high(b, p), w), keys[1]))
        y, w = q, p
        keys = [low(b, b.add(k, s)) for k, s in zip(keys, KEY_STEPS, strict=True)]
    return b.reshape_to(b.concat([b.unsqueeze(low(b, v), 1) for v in (x, y, z, w)], dim=1), (4 * blocks,))


def low(b: StepBuilder, x: Value) -> Value:
    return b.bit_and(x, LOW)


def high(b: StepBuilder, x: Value) -> Value:
    """The bits from the 32nd on."""
    return b.div(x, 1 << 32, rounding="floor")


def part(b: StepBuilder, x: Value, start: int, end: int, stride: int = 1) -> Value:
    whole = start == 0 and stride == 1 and end == x.type.shape[0]
    return x if whole else b.slice(x, dim=0, start=start, end=end, stride=stride)


def fractions(b: StepBuilder, words: Value, element: ScalarType, inner: bool = False) -> Value:
    """Words as fractions in [0, 1), or with `inner` in (0, 1)."""
    bits, count = digits(torch_dtype(element)) - inner, words.type.shape[0]
    if element is F64:
        upper, lower = part(b, words, 0, count, 2), part(b, words, 1, count, 2)
        upper = b.mul(b.div(upper, 1 << 5, rounding="floor"), 1 << bits - 27)
        number = b.add(upper, b.div(lower, 1 << 59 - bits, rounding="floor"))
    else:
        number = b.div(words, 1 << 32 - bits, rounding="floor")
    fraction = b.mul(b.cast(number, dtype=element), 2.0**-bits)
    return b.add(fraction, 2.0 ** -(bits + 1)) if inner else fraction


def box_muller(b: StepBuilder, fractions: Value) -> Value:
    """Standard normal numbers from pairs of fractions."""
    count = fractions.type.shape[0]
    radius = b.sqrt(b.mul(b.log(part(b, fractions, 0, count, 2)), -2.0))
    angle = b.mul(part(b, fractions, 1, count, 2), 2 * math.pi)
    both = [b.unsqueeze(b.mul(radius, turned), 1) for turned in (b.cos(angle), b.sin(angle))]
    return b.reshape_to(b.concat(both, dim=1), (count,))
