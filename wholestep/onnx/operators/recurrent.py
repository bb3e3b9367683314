"""Recurrent layers, unrolled over their known number of time steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from . import operator
from .elementwise import elu, softplus
from .support import clamped, cut, limited, positions

Activation = Callable[[Value], Value]


class Layer:
    """What the three kinds share: shapes, weights of a direction, activations, lengths."""

    def __init__(
        self, c: Context, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None, lengths: Tensor | None, gates: int,
        defaults: tuple[str, ...],
    ):  # fmt: skip
        self.c, self.b, self.gates = c, c.b, gates
        b = self.b
        self.batch_first = bool(c.attribute("layout", 0))
        self.x = b.transpose(x.value, order=(1, 0, 2)) if self.batch_first else x.value
        self.steps, self.batch, _ = self.x.type.shape
        limited(c, self.steps)
        way = c.attribute("direction", "forward")
        ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
        if way not in ways:
            raise c.wrong(f"{way!r} is not a direction")
        self.backwards = ways[way]
        self.hidden = r.shape[-1]
        if w.shape[:2] != (len(self.backwards), gates * self.hidden) or r.shape[:2] != w.shape[:2]:
            raise c.wrong(f"its weights {list(w.shape)} and {list(r.shape)} do not fit")
        self.w, self.r, self.bias, self.lengths = w, r, bias, lengths
        names = c.attribute("activations") or list(defaults) * len(self.backwards)
        if len(names) < len(defaults) * len(self.backwards):
            raise c.wrong(f"it needs {len(defaults) * len(self.backwards)} activations")
        alphas, betas = iter(c.attribute("activation_alpha") or ()), iter(c.attribute("activation_beta") or ())
        found = [activation(c, name, alphas, betas) for name in names]
        per = len(defaults)
        self.activations = [found[i * per : (i + 1) * per] for i in range(len(self.backwards))]

    def part(self, x: Tensor, direction: int) -> Value:
        """The slice of a weight for one direction."""
        return self.b.reshape_to(cut(self.b, x.value, 0, direction, direction + 1), x.shape[1:])

    def start(self, given: Tensor | None, direction: int) -> Value:
        """The first state of a direction."""
        if given is None:
            return self.b.full(0.0, (self.batch, self.hidden), self.x.type.element)
        value = self.b.transpose(given.value, order=(1, 0, 2)) if self.batch_first else given.value
        return self.b.reshape_to(cut(self.b, value, 0, direction, direction + 1), (self.batch, self.hidden))

    def biases(self, direction: int) -> list[Value] | None:
        """Bias of the input and bias of the recurrence."""
        if self.bias is None:
            return None
        both, half = self.part(self.bias, direction), self.gates * self.hidden
        return [cut(self.b, both, 0, 0, half), cut(self.b, both, 0, half, 2 * half)]

    def turned(self, x: Value) -> Value:
        """Time backwards, each sequence within its own length."""
        b = self.b
        if self.lengths is None:
            return b.flip(x, dims=(0,))
        place = b.unsqueeze(positions(b, self.steps), 1)
        length = b.unsqueeze(b.cast_to(self.lengths.value, I64), 0)
        index = b.select(b.lt(place, length), b.sub(b.sub(length, 1), place), place)
        return b.gather(x, b.broadcast_to(b.unsqueeze(index, 2), x.type.shape), dim=0)

    def alive(self, step: int) -> Value | None:
        """Which sequences have not ended yet."""
        if self.lengths is None:
            return None
        return self.b.unsqueeze(self.b.gt(self.b.cast_to(self.lengths.value, I64), step), 1)

    def bounded(self, x: Value) -> Value:
        clip = self.c.attribute("clip")
        return x if not clip else clamped(self.b, x, -clip, clip)

    def columns(self, x: Value, count: int, first: int = 0) -> list[Value]:
        """Gates side by side, apart."""
        last, size = x.type.rank - 1, self.hidden
        return [cut(self.b, x, last, (first + i) * size, (first + i + 1) * size) for i in range(count)]

    def run(self, states: list[list[Value]], step: Callable[..., list[Value]]) -> list[Value]:
        """Runs `step(direction, time step's input, states) -> new states` over time; gives Y and the last states."""
        b = self.b
        outputs, lasts = [], []
        for d, backwards in enumerate(self.backwards):
            x = self.turned(self.x) if backwards else self.x
            projected = b.contract(x, self.part(self.w, d), spec="tbi,gi->tbg")
            state, shown = states[d], []
            for t in range(self.steps):
                now = b.reshape_to(cut(b, projected, 0, t, t + 1), projected.type.shape[1:])
                new = step(d, now, state)
                alive = self.alive(t)
                if alive is not None:
                    shown.append(b.select(alive, new[0], 0.0))
                    new = [b.select(alive, n, o) for n, o in zip(new, state, strict=True)]
                else:
                    shown.append(new[0])
                state = new
            y = b.concat([b.unsqueeze(s, 0) for s in shown], dim=0) if len(shown) > 1 else b.unsqueeze(shown[0], 0)
            outputs.append(b.unsqueeze(self.turned(y) if backwards else y, 1))
            lasts.append([b.unsqueeze(s, 0) for s in state])
        y = b.concat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        ends = [b.concat(list(e), dim=0) if len(e) > 1 else e[0] for e in zip(*lasts, strict=True)]
        if self.batch_first:
            return [b.transpose(y, order=(2, 0, 1, 3)), *(b.transpose(e, order=(1, 0, 2)) for e in ends)]
        return [y, *ends]


def activation(c: Context, name: str, alphas: Any, betas: Any) -> Activation:
    """An activation by name; those with parameters take theirs from the lists in order."""
    b, kind = c.b, name.lower()
    plain: dict[str, Activation] = {
        "sigmoid": b.sigmoid, "tanh": b.tanh, "relu": b.relu, "softplus": lambda x: softplus(b, x),
        "softsign": lambda x: b.div(x, b.add(b.abs(x), 1.0)),
    }  # fmt: skip
    if kind in plain:
        return plain[kind]
    one = {"leakyrelu": 0.01, "thresholdedrelu": 1.0, "elu": 1.0}
    if kind in one:
        a = next(alphas, one[kind])
        made: dict[str, Activation] = {
            "leakyrelu": lambda x: b.select(b.lt(x, 0.0), b.mul(x, a), x),
            "thresholdedrelu": lambda x: b.select(b.ge(x, a), x, 0.0),
            "elu": lambda x: elu(b, x, a),
        }
        return made[kind]
    two = {"affine": (1.0, 0.0), "scaledtanh": (1.0, 1.0), "hardsigmoid": (0.2, 0.5)}
    if kind not in two:
        raise c.wrong(f"{name!r} is not an activation")
    p, q = next(alphas, two[kind][0]), next(betas, two[kind][1])
    if kind == "affine":
        return lambda x: b.add(b.mul(x, p), q)
    if kind == "scaledtanh":
        return lambda x: b.mul(b.tanh(b.mul(x, q)), p)
    return lambda x: clamped(b, b.add(b.mul(x, p), q), 0.0, 1.0)


@operator("RNN")
def rnn(
    c: Context, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    first: Tensor | None = None,
):  # fmt: skip
    layer, b = Layer(c, x, w, r, bias, lengths, 1, ("Tanh",)), c.b

    def step(d: int, now: Value, state: list[Value]) -> list[Value]:
        total = b.add(now, b.contract(state[0], layer.part(r, d), spec="bh,gh->bg"))
        both = layer.biases(d)
        total = total if both is None else b.add(total, b.add(*both))
        return [layer.activations[d][0](layer.bounded(total))]

    return layer.run([[layer.start(first, d)] for d in range(len(layer.backwards))], step)


@operator("GRU")
def gru(
    c: Context, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    first: Tensor | None = None,
):  # fmt: skip
    layer, b = Layer(c, x, w, r, bias, lengths, 3, ("Sigmoid", "Tanh")), c.b
    linear, size = bool(c.attribute("linear_before_reset", 0)), layer.hidden

    def step(d: int, now: Value, state: list[Value]) -> list[Value]:
        (h,), (f, g) = state, layer.activations[d]
        weights, both = layer.part(r, d), layer.biases(d)
        if both is not None:
            now = b.add(now, both[0])
        update_and_reset = b.contract(h, cut(b, weights, 0, 0, 2 * size), spec="bh,gh->bg")
        if both is not None:
            update_and_reset = b.add(update_and_reset, cut(b, both[1], 0, 0, 2 * size))
        z, s = layer.columns(b.add(cut(b, now, 1, 0, 2 * size), update_and_reset), 2)
        z, s = f(layer.bounded(z)), f(layer.bounded(s))
        candidate, own = cut(b, now, 1, 2 * size, 3 * size), cut(b, weights, 0, 2 * size, 3 * size)
        shift = None if both is None else cut(b, both[1], 0, 2 * size, 3 * size)
        if linear:
            inner = b.contract(h, own, spec="bh,gh->bg")
            inner = b.mul(s, inner if shift is None else b.add(inner, shift))
        else:
            inner = b.contract(b.mul(s, h), own, spec="bh,gh->bg")
            inner = inner if shift is None else b.add(inner, shift)
        new = g(layer.bounded(b.add(candidate, inner)))
        return [b.add(b.mul(b.sub(1.0, z), new), b.mul(z, h))]

    return layer.run([[layer.start(first, d)] for d in range(len(layer.backwards))], step)


@operator("LSTM")
def lstm(
    c: Context, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    first: Tensor | None = None, first_cell: Tensor | None = None, peephole: Tensor | None = None,
):  # fmt: skip
    layer, b = Layer(c, x, w, r, bias, lengths, 4, ("Sigmoid", "Tanh", "Tanh")), c.b

    def step(d: int, now: Value, state: list[Value]) -> list[Value]:
        (h, cell), (f, g, last) = state, layer.activations[d]
        total = b.add(now, b.contract(h, layer.part(r, d), spec="bh,gh->bg"))
        both = layer.biases(d)
        total = total if both is None else b.add(total, b.add(*both))
        i, o, forget, new = layer.columns(total, 4)
        peeps = None if peephole is None else layer.columns(layer.part(peephole, d), 3)
        if peeps is not None:
            i, forget = b.add(i, b.mul(peeps[0], cell)), b.add(forget, b.mul(peeps[2], cell))
        i = f(layer.bounded(i))
        forget = b.sub(1.0, i) if c.attribute("input_forget") else f(layer.bounded(forget))
        cell = b.add(b.mul(forget, cell), b.mul(i, g(layer.bounded(new))))
        if peeps is not None:
            o = b.add(o, b.mul(peeps[1], cell))
        return [b.mul(f(layer.bounded(o)), last(layer.bounded(cell))), cell]

    if c.attribute("clip"):  # runtimes differ about whether the cell is clipped too
        raise c.unsupported("an LSTM with clip is not supported", "leave it out")
    starts = [[layer.start(first, d), layer.start(first_cell, d)] for d in range(len(layer.backwards))]
    return layer.run(starts, step)
