"""Random small programs for the property tests: each move draws an op that fits the tensors made so far.

A program is a list of moves on a growing pool of tensors; running it again on the same inputs does the same, so eager
PyTorch, a trace and a captured program can be compared. Pool members may be views of each other, written by moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

Pool = list[torch.Tensor]
Move = Callable[[Pool], list[torch.Tensor]]
Draw = Callable[[Any], Any]

LARGEST = 400  # elements of a tensor


@dataclass
class Program:
    """Inputs (the first `leaves` of them are differentiated) and the moves made with them."""

    inputs: Pool
    leaves: int
    moves: list[Move] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    single: bool = False  # whether float32 is used somewhere, so that results agree to its rounding only

    def fresh_inputs(self) -> Pool:
        """Copies of the inputs with the same strides, those to differentiate as leaves."""
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in self.inputs]
        return [t.requires_grad_(i < self.leaves) for i, t in enumerate(copies)]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """All float tensors of the pool as they are in the end, then one number made of them."""
        pool = list(inputs)
        for move in self.moves:
            pool += move(pool)
        made = [t for t in pool[len(inputs) :] if t.is_floating_point()]
        total = sum(
            (t * t).sum(dtype=torch.float64) * 0.1 + t.sum(dtype=torch.float64) * math.sin(i)
            for i, t in enumerate(made)
        )
        return [*pool[len(inputs) :], torch.as_tensor(total)]


def noise(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@st.composite
def programs(draw: Draw, moves: int = 9) -> Program:
    """A random program with at least one tensor to differentiate."""
    shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
    leaves = draw(st.integers(1, 3))
    inputs = [noise(i, draw(shapes)) for i in range(leaves)]
    if draw(st.booleans()):  # not contiguous
        inputs.append(noise(7, (4, 3)).t()[:, ::2])
    inputs += [torch.tensor([1, 0, 2, 1]), noise(8, (3, 1)) > 0]
    program = Program(inputs, leaves)
    pool = program.fresh_inputs()
    for _ in range(draw(st.integers(2, moves))):
        name, maker = draw(st.sampled_from(MOVES))
        move = maker(draw, program, pool)
        if move is None:
            continue
        try:
            made = move(pool)
        except RuntimeError:  # what autograd does not allow, such as a write to a view of a leaf
            continue
        if any(t.numel() > LARGEST or not t.isfinite().all() or t.abs().max() > 1e4 for t in made if t.numel()):
            continue
        pool += made
        program.moves.append(move)
        program.names.append(name)
        program.single |= any(t.dtype is torch.float32 for t in made)
    return program


# ---- picking operands ------------------------------------------------------------------------------------------------


def floats(pool: Pool) -> list[int]:
    return [i for i, t in enumerate(pool) if t.is_floating_point() and t.numel()]


def pick(draw: Draw, pool: Pool, rank: int = 0) -> int | None:
    """A float tensor with at least this rank; later ones are likelier, so that programs get deep."""
    fit = [i for i in floats(pool) if pool[i].dim() >= rank]
    if not fit:
        return None
    return fit[-1 - draw(st.integers(0, min(len(fit) - 1, 4)))]


def dimension(draw: Draw, x: torch.Tensor) -> int:
    return draw(st.integers(-x.dim(), x.dim() - 1))


# ---- moves -----------------------------------------------------------------------------------------------------------

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "elu": F.elu,
    "abs": torch.abs,
    "neg": lambda x: -x,
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "round": lambda x: x - torch.round(x),
    "pow": lambda x: x**3 * 0.1,
    "expm1": lambda x: torch.expm1(-x.abs()),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.25),
    "detach": lambda x: x.detach() * 2,
    "opaque": lambda x: torch.special.entr(torch.sigmoid(x)),
}
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "rsub": lambda x, y: 1.5 - x * y,
    "atan2": lambda x, y: torch.atan2(x, y.abs() + 1),
    "lerp": lambda x, y: torch.lerp(*torch.broadcast_tensors(x.double(), y.double()), 0.3),
    "remainder": lambda x, y: torch.remainder(x, 1.5) + y,
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
}


def unary(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool)
    function = UNARY[draw(st.sampled_from(sorted(UNARY)))]
    return None if i is None else lambda p: [function(p[i])]


def binary(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool)
    if i is None:
        return None
    fit = []
    for j in floats(pool):
        try:
            torch.broadcast_shapes(pool[i].shape, pool[j].shape)
            fit.append(j)
        except RuntimeError:
            continue
    j = fit[-1 - draw(st.integers(0, len(fit) - 1))]
    name = draw(st.sampled_from(sorted(BINARY)))
    if name in ("addcmul", "atan2", "maximum") and pool[i].dtype is not pool[j].dtype:
        return None
    function = BINARY[name]
    return lambda p: [function(p[i], p[j])]


def cast(draw: Draw, program: Program, pool: Pool) -> Move | None:
    """Other element types, and promotion between them."""
    i = pick(draw, pool)
    if i is None:
        return None
    kind = draw(st.sampled_from(["float32", "float64", "int64", "bool", "int32 mix", "bool mix"]))
    if kind == "int64":
        return lambda p: [(p[i] * 3).to(torch.int64) * 0.5 + p[i]]
    if kind == "bool":
        return lambda p: [(p[i] > 0).to(p[i].dtype) * p[i]]
    if kind == "int32 mix":
        return lambda p: [p[i] * (p[i] > 0).to(torch.int32) + (p[i] < 0.5)]
    if kind == "bool mix":
        return lambda p: [torch.where((p[i] > 0) & ~(p[i] > 1), p[i], (p[i] < 0).sum() * 0.1)]
    dtype = getattr(torch, kind)
    return lambda p: [p[i].to(dtype)]


def view_of(draw: Draw, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A random view (or, for `reshape` of what is not contiguous, a copy)."""
    choices = ["unsqueeze", "same", "reshape", "flatten"]
    if x.dim():
        choices += ["slice", "select", "stride", "squeeze", "chunk", "narrow", "unbind"]
    if x.dim() >= 2:
        choices += ["transpose", "permute", "t", "diagonal", "movedim", "mT"]
    kind = draw(st.sampled_from(choices))
    shape = tuple(x.shape)
    if kind == "unsqueeze":
        dim = draw(st.integers(0, x.dim()))
        return lambda t: t.unsqueeze(dim)
    if kind == "reshape":
        return lambda t: t.reshape(shape[::-1])
    if kind == "flatten":
        return lambda t: t.flatten()
    if kind == "same":
        return lambda t: t.view_as(t)
    if kind == "squeeze":
        return lambda t: t.squeeze()
    dim = dimension(draw, x)
    size = x.shape[dim]
    if kind == "transpose":
        other = dimension(draw, x)
        return lambda t: t.transpose(dim, other)
    if kind == "permute":
        order = draw(st.permutations(range(x.dim())))
        return lambda t: t.permute(order)
    if kind in ("t", "mT"):
        return lambda t: t.t() if t.dim() == 2 else t.mT
    if kind == "diagonal":
        return lambda t: t.diagonal(0, 0, -1)
    if kind == "movedim":
        return lambda t: t.movedim(dim, 0)
    if kind == "select":
        index = draw(st.integers(-size, size - 1))
        return lambda t: t.select(dim, index)
    if kind == "unbind":
        return lambda t: t.unbind(dim)[-1]
    if kind == "chunk":
        return lambda t: t.chunk(2, dim)[0]
    if kind == "stride":
        return lambda t: t.movedim(dim, 0)[::2]
    start = draw(st.integers(0, size - 1))
    if kind == "narrow":
        return lambda t: t.narrow(dim, start, 1)
    return lambda t: t.movedim(dim, 0)[start:].movedim(0, dim)


def view(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool)
    if i is None:
        return None
    function = view_of(draw, pool[i])
    return lambda p: [function(p[i])]


def expand(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool)
    if i is None or pool[i].numel() > 64:
        return None
    copies = draw(st.integers(1, 3))
    return lambda p: [p[i].unsqueeze(0).expand(copies, *p[i].shape) * 1.0, p[i].repeat(copies, *(1,) * p[i].dim())]


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(1.5),
    "add_": lambda t: t.add_(0.25, alpha=2),
    "tanh_": lambda t: t.tanh_(),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(0.3),
    "copy_": lambda t: t.copy_(t.detach().flip(0) * 0.5 if t.dim() else t.detach() * 0.5),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.1),
    "clamp_": lambda t: t.clamp_(max=0.4),
    "sub_": lambda t: t.sub_(t.detach().mean()),
    "div_": lambda t: t.div_(2),
    "setitem": lambda t: t.__setitem__(..., t.detach().sum() * 0.01),
}


def in_place(draw: Draw, program: Program, pool: Pool) -> Move | None:
    """A write through a view of a copy, or of a tensor of the pool that others may share memory with."""
    function = IN_PLACE[draw(st.sampled_from(sorted(IN_PLACE)))]
    shared = [i for i in floats(pool) if i >= len(program.inputs)]
    if shared and draw(st.booleans()):
        i = shared[-1 - draw(st.integers(0, len(shared) - 1))]
        look = view_of(draw, pool[i])

        def write(p: Pool) -> list[torch.Tensor]:
            function(look(p[i]))
            return []

        return write
    i = pick(draw, pool)
    if i is None:
        return None
    first = view_of(draw, pool[i])
    second = view_of(draw, first(pool[i].detach()))

    def move(p: Pool) -> list[torch.Tensor]:
        base = p[i].clone()
        seen = first(base)
        function(second(seen))
        return [base, seen]

    return move


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, d, k: x.sum(d, keepdim=k),
    "mean": lambda x, d, k: x.mean(d, keepdim=k),
    "amax": lambda x, d, k: x.amax(d, keepdim=k),
    "max": lambda x, d, k: x.max(d, keepdim=k).values,
    "min": lambda x, d, k: x.min(d, keepdim=k)[0],
    "logsumexp": lambda x, d, k: x.logsumexp(d, keepdim=k),
    "var": lambda x, d, k: x.var(d, correction=0, keepdim=k),
    "norm": lambda x, d, k: torch.linalg.vector_norm(x, dim=d, keepdim=k),
    "softmax": lambda x, d, k: x.softmax(d),
    "log_softmax": lambda x, d, k: x.log_softmax(d),
    "cumsum": lambda x, d, k: x.cumsum(d),
    "sort": lambda x, d, k: x.sort(d, descending=k).values,
    "topk": lambda x, d, k: x.topk(1, d, largest=k)[0],
    "prod": lambda x, d, k: torch.tanh(x).prod(d, keepdim=k),
    "argmax": lambda x, d, k: x * x.argmax(d, keepdim=True),
    "count": lambda x, d, k: x / ((x > 0).sum(d, keepdim=True) + 1),
}


def reduction(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool, 1)
    if i is None:
        return None
    function, dim, keep = (
        REDUCTIONS[draw(st.sampled_from(sorted(REDUCTIONS)))],
        dimension(draw, pool[i]),
        draw(st.booleans()),
    )
    return lambda p: [function(p[i], dim, keep)]


def indexing(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool, 1)
    if i is None:
        return None
    number = next(j for j, t in enumerate(program.inputs) if t.dtype is torch.int64)
    dim, size = dimension(draw, pool[i]), pool[i].shape[0]
    kind = draw(st.sampled_from(["take", "select", "gather", "set", "add", "scatter", "mask", "negative", "index_add"]))
    if kind == "take":
        return lambda p: [p[i][p[number] % size]]
    if kind == "negative":
        return lambda p: [p[i][-1 - p[number] % size]]
    if kind == "select":
        return lambda p: [p[i].index_select(dim, p[number] % p[i].shape[dim])]
    if kind == "gather":
        return lambda p: [p[i].gather(dim, p[i].argsort(dim))]
    if kind == "mask":
        return lambda p: [torch.where(p[i] > p[i].mean(), p[i], torch.zeros_like(p[i]))]

    def change(p: Pool) -> list[torch.Tensor]:
        x, index = p[i].clone(), p[number] % size
        if kind == "set":
            x[index[:1]] = x.detach().mean()
        elif kind == "add":
            x.index_put_((index,), x[index] * 0.5, accumulate=True)
        elif kind == "index_add":
            x.index_add_(0, index, torch.ones_like(x)[index] * 0.5)
        else:
            x = x.scatter_add(0, x.detach().argsort(0), x)
        return [x]

    return change


def joining(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool, 1)
    if i is None:
        return None
    dim = dimension(draw, pool[i])
    kind = draw(st.sampled_from(["cat", "stack", "roll", "flip", "pad", "interleave", "split", "tril"]))
    if kind == "cat":
        return lambda p: [torch.cat([p[i], p[i] * 0.5], dim)]
    if kind == "stack":
        return lambda p: [torch.stack([p[i], p[i].sin()], dim)]
    if kind == "roll":
        return lambda p: [p[i].roll(1, dim)]
    if kind == "flip":
        return lambda p: [p[i].flip(dim)]
    if kind == "pad":
        return lambda p: [F.pad(p[i], (1, 2), value=0.5)]
    if kind == "interleave":
        return lambda p: [p[i].repeat_interleave(2, dim)]
    if kind == "tril" and pool[i].dim() >= 2:
        return lambda p: [p[i].tril()]
    return lambda p: list(p[i].split(max(1, p[i].shape[dim] // 2), dim))[:3]


def product(draw: Draw, program: Program, pool: Pool) -> Move | None:
    i = pick(draw, pool, 1)
    if i is None:
        return None
    kind = draw(st.sampled_from(["self", "linear", "einsum", "norm"]))
    size = pool[i].shape[-1]
    if kind == "self" and pool[i].dim() >= 2:
        return lambda p: [p[i] @ p[i].mT]
    if kind == "norm" and size > 1:
        return lambda p: [F.layer_norm(p[i], (size,))]
    if kind == "einsum":
        return lambda p: [torch.einsum("...i,...i->...", p[i], p[i])]
    # the weight is made of the input, so that its gradient is asked for too
    return lambda p: [
        F.linear(p[i], (p[i].reshape(-1, size)[:1] + 0.1).expand(3, size).contiguous(), p[i].sum().expand(3))
    ]


MOVES = [
    ("unary", unary),
    ("binary", binary),
    ("binary", binary),
    ("cast", cast),
    ("view", view),
    ("view", view),
    ("expand", expand),
    ("in place", in_place),
    ("in place", in_place),
    ("reduction", reduction),
    ("indexing", indexing),
    ("joining", joining),
    ("product", product),
]
