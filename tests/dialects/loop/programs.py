"""Random programs of the step dialect for the tests of lowering and fusion: tensors that fit together, op after op."""

from __future__ import annotations

import random
from typing import Any

import torch

from wholestep.dialects.step import StepBuilder, tensor_type, torch_dtype
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op, Value

UNARY = ("neg", "abs", "tanh", "sigmoid", "sin", "relu", "silu", "gelu")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
SIZES = (1, 2, 3, 4, 6)
LARGEST = 1500  # elements of a tensor


class Drawn:
    """A random program: its function and its inputs. The same seed gives the same program."""

    def __init__(self, seed: int, ops: int = 0, float64: bool = True):
        self.pick = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        shapes = [self.shape() for _ in range(self.pick.randint(1, 3))]
        dtype = torch.float64 if float64 else torch.float32
        self.inputs = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
        self.function = add_function(module(), "program", [tensor_type(x) for x in self.inputs])
        block = self.function.regions[0].block
        self.b = StepBuilder(block)
        self.values: list[Value] = list(block.arguments)
        self.names: list[str] = []
        wanted = ops or self.pick.randint(3, 12)
        while len(self.names) < wanted:
            name = self.pick.choice(tuple(MOVES))
            made = getattr(self, MOVES[name])(self.value())
            if made is not None and 0 < made.type.size <= LARGEST:
                self.values.append(made)
                self.names.append(name)
        loose = [v for v in self.values[len(self.inputs) :] if not v.uses]
        self.results = self.pick.sample(loose, self.pick.randint(1, min(3, len(loose))))
        if self.pick.random() < 0.4:  # something on the way is wanted as well
            inner = [v for v in self.values[len(self.inputs) :] if v not in self.results]
            self.results += inner[-1:]
        finish_function(self.function, self.results)

    def shape(self) -> tuple[int, ...]:
        return tuple(self.pick.choice(SIZES) for _ in range(self.pick.randint(0, 3)))

    def value(self) -> Value:
        """A value, mostly one of the last."""
        return self.pick.choice(self.values[-4:])

    # ---- moves: each makes a value, or None where nothing fits -------------------------------------------------------

    def unary(self, x: Value) -> Value:
        return getattr(self.b, self.pick.choice(UNARY))(x)

    def binary(self, x: Value) -> Value | None:
        fits = [v for v in self.values if together(v.type.shape, x.type.shape)]
        return getattr(self.b, self.pick.choice(BINARY))(x, self.pick.choice(fits))

    def scaled(self, x: Value) -> Value:
        return self.b.mul(x, self.pick.choice((0.5, -1.25, 2.0)))

    def select(self, x: Value) -> Value | None:
        fits = [v for v in self.values if together(v.type.shape, x.type.shape)]
        y = self.pick.choice(fits)
        return self.b.select(self.b.gt(x, y), x, y)

    def reshape(self, x: Value) -> Value:
        left, shape = x.type.size, []
        while left > 1 and len(shape) < 4:
            part = self.pick.choice([n for n in range(1, left + 1) if left % n == 0])
            shape.append(part)
            left //= part
        return self.b.reshape(x, shape=(*shape, left))

    def transpose(self, x: Value) -> Value | None:
        order = list(range(x.type.rank))
        self.pick.shuffle(order)
        return self.b.transpose(x, order=tuple(order)) if order else None

    def broadcast(self, x: Value) -> Value:
        shape = [self.pick.choice(SIZES) if n == 1 else n for n in x.type.shape]
        lead = [self.pick.choice(SIZES) for _ in range(self.pick.randint(0, 1))]
        return self.b.broadcast(x, shape=(*lead, *shape))

    def slice(self, x: Value) -> Value | None:
        found = self.stretch(x)
        return None if found is None else self.b.slice(x, **found)

    def stretch(self, x: Value) -> dict[str, int] | None:
        if not x.type.rank:
            return None
        dim = self.pick.randrange(x.type.rank)
        n = x.type.shape[dim]
        start = self.pick.randrange(n)
        return dict(dim=dim, start=start, end=self.pick.randint(start + 1, n), stride=self.pick.choice((1, 1, 2)))

    def slice_grad(self, x: Value) -> Value | None:
        if not x.type.rank:
            return None
        dim, stride = self.pick.randrange(x.type.rank), self.pick.choice((1, 1, 2))
        n, start = x.type.shape[dim], self.pick.randint(0, 3)
        end = start + (n - 1) * stride + 1
        return self.b.slice_grad(x, dim=dim, start=start, end=end, stride=stride, size=end + self.pick.randint(0, 2))

    def slice_update(self, x: Value) -> Value | None:
        found = self.stretch(x)
        return None if found is None else self.b.slice_update(x, self.b.tanh(self.b.slice(x, **found)), **found)

    def concat(self, x: Value) -> Value | None:
        if not x.type.rank:
            return None
        dim = self.pick.randrange(x.type.rank)
        others = [v for v in self.values if alike_but(v.type.shape, x.type.shape, dim)]
        return self.b.concat([x, *self.pick.choices(others, k=self.pick.randint(1, 2))], dim=dim)

    def pad(self, x: Value) -> Value | None:
        if not x.type.rank:
            return None
        low = tuple(self.pick.choice((0, 0, 1, 2, -1)) for _ in x.type.shape)
        high = tuple(self.pick.choice((0, 0, 1, 2)) for _ in x.type.shape)
        if any(n + lo + hi <= 0 for n, lo, hi in zip(x.type.shape, low, high, strict=True)):
            return None
        return self.b.pad(x, low=low, high=high, value=self.pick.choice((0.0, 1.5)))

    def flip(self, x: Value) -> Value:
        return self.b.flip(x, dims=self.dims(x))

    def dims(self, x: Value) -> tuple[int, ...]:
        found = [d for d in range(x.type.rank) if self.pick.random() < 0.5]
        return tuple(found) or tuple(range(x.type.rank))[-1:]

    def reduction(self, x: Value) -> Value | None:
        if not x.type.rank:
            return None
        name = self.pick.choice(("sum", "sum", "amax", "amin", "mean"))
        return getattr(self.b, name)(x, dims=self.dims(x), keepdim=self.pick.random() < 0.5)

    def softmax(self, x: Value) -> Value | None:
        return self.b.softmax(x, dim=self.pick.randrange(x.type.rank)) if x.type.rank else None


MOVES = {name: name for name in (
    "unary", "binary", "scaled", "select", "reshape", "transpose", "broadcast", "slice", "slice_grad", "slice_update",
    "concat", "pad", "flip", "reduction", "softmax",
)} | {"binary again": "binary", "unary again": "unary", "reduction again": "reduction"}  # fmt: skip


def together(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes broadcast."""
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


def alike_but(one: tuple[int, ...], other: tuple[int, ...], dim: int) -> bool:
    return len(one) == len(other) and all(a == b or d == dim for d, (a, b) in enumerate(zip(one, other, strict=True)))


def outputs_for(function: Op, fill: Any = 7) -> list[torch.Tensor]:
    """Memory for what a function returns; floats as float64, with something in it that no result has."""
    last = function.regions[0].block.last
    assert last is not None
    dtypes = [torch_dtype(v.type.element) for v in last.operands]
    wide = [torch.float64 if d.is_floating_point else d for d in dtypes]
    return [torch.full(v.type.shape, fill, dtype=d) for v, d in zip(last.operands, wide, strict=True)]
