"""Attention: as one op where its shape is the usual one, else by the products and the softmax it consists of."""

from __future__ import annotations

import math

from ...dialects.step import StepBuilder
from ...ir.core import Value
from ...ir.types import BOOL, I64
from ..context import Context, Tensor
from ..dtypes import element_of
from . import operator
from .support import positions


@operator("Attention")
def attention(
    c: Context,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
):
    b = c.b
    if not q.rank == k.rank == v.rank or q.rank not in (3, 4):
        raise c.wrong("its inputs must all have rank 3, or all rank 4")
    if (past_key is None) != (past_value is None) or (lengths is not None and past_key is not None):
        raise c.wrong("past keys and values come together, and without lengths")
    if q.element is not v.element:
        raise c.unsupported("values of another type than the queries are not supported", "cast them")
    query, key, value = (
        heads_apart(c, x, n) for x, n in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads"))
    )
    if query.type.shape[3] != key.type.shape[3] or key.type.shape[2] != value.type.shape[2]:
        raise c.wrong("its queries, keys and values do not fit each other")
    if past_key is not None and past_value is not None:
        key, value = b.concat([past_key.value, key], dim=2), b.concat([past_value.value, value], dim=2)
    present = [key, value] if past_key is not None or c.wants(1) or c.wants(2) else [None, None]
    heads = query.type.shape[1]
    if heads % key.type.shape[1] or key.type.shape[1] != value.type.shape[1]:
        raise c.wrong(f"{heads} heads of queries do not fit {key.type.shape[1]} heads of keys")
    key, value = repeated(b, key, heads), repeated(b, value, heads)
    scale = c.attribute("scale")
    scale = 1 / math.sqrt(query.type.shape[-1]) if scale is None else scale
    if scale < 0:
        raise c.unsupported("a negative scale is not supported", "negate the queries")
    offset = past_key.shape[2] if past_key is not None else 0
    seen = visible(c, query, key, offset, lengths)
    bias = widened(c, mask, key.type.shape[2])
    plain = not c.attribute("softcap") and not c.attribute("softmax_precision") and not c.wants(3)
    if plain and (q.element.bits >= 32 or c.training is not None):
        out = b.attention(query, key, value, one_mask(b, seen, bias, q), causal=False, scale=scale)[0]
        return [heads_together(b, out, q.rank), *present]
    out, shown = by_parts(c, query, key, value, scale, seen, bias)
    return [heads_together(b, out, q.rank), *present, shown]


def heads_apart(c: Context, x: Tensor, name: str) -> Value:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    if x.rank == 4:
        return x.value
    n, length, width = x.shape
    heads = c.attribute(name)
    if not heads or width % heads:
        raise c.wrong(f"its {name} {heads} does not fit a width of {width}")
    return c.b.transpose(c.b.reshape_to(x.value, (n, length, heads, width // heads)), order=(0, 2, 1, 3))


def heads_together(b: StepBuilder, x: Value, rank: int) -> Value:
    if rank == 4:
        return x
    n, heads, length, size = x.type.shape
    return b.reshape_to(b.transpose(x, order=(0, 2, 1, 3)), (n, length, heads * size))


def repeated(b: StepBuilder, x: Value, heads: int) -> Value:
    """Each head repeated so that there are as many as the queries have."""
    n, own, length, size = x.type.shape
    if own == heads:
        return x
    wide = b.broadcast_to(b.unsqueeze(x, 2), (n, own, heads // own, length, size))
    return b.reshape_to(wide, (n, heads, length, size))


def visible(c: Context, q: Value, k: Value, offset: int, lengths: Tensor | None) -> Value | None:
    """Which keys a query may see by its place: causality, windows, and the number of keys that are there."""
    b = c.b
    rows, columns = q.type.shape[2], k.type.shape[2]
    row = b.reshape_to(positions(b, rows, start=offset), (1, 1, rows, 1))
    column = b.reshape_to(positions(b, columns), (1, 1, 1, columns))
    rules = []
    if lengths is not None:
        there = b.reshape_to(b.cast_to(lengths.value, I64), (q.type.shape[0], 1, 1, 1))
        row = b.add(row, b.sub(there, rows))
        rules.append(b.lt(column, there))
    left, right = c.attribute("left_window_size", -1), c.attribute("right_window_size", -1)
    if c.attribute("is_causal"):
        rules.append(b.le(column, row))
    if left >= 0:
        rules.append(b.le(b.sub(row, column), left))
    if right >= 0:
        rules.append(b.le(b.sub(column, row), right))
    seen: Value | None = None
    for rule in rules:
        seen = rule if seen is None else b.bit_and(seen, rule)
    return seen


def widened(c: Context, mask: Tensor | None, columns: int) -> Value | None:
    """The mask for all keys: those it says nothing about are not seen."""
    if mask is None:
        return None
    more = columns - mask.shape[-1] if mask.rank else 0
    if more < 0:
        raise c.wrong(f"its mask of shape {list(mask.shape)} is for more than {columns} keys")
    if more == 0 or mask.shape[-1] == 1:
        return mask.value
    high = (*(0,) * (mask.rank - 1), more)
    hidden: float | bool = False if mask.element is BOOL else -math.inf
    if mask.element is not BOOL and not mask.is_float:
        raise c.unsupported("masks of integers are not supported", "use booleans")
    return c.b.pad(mask.value, low=(0,) * mask.rank, high=high, value=hidden)


def one_mask(b: StepBuilder, seen: Value | None, bias: Value | None, q: Tensor) -> Value | None:
    if bias is None or seen is None:
        mask = seen if bias is None else bias
    elif bias.type.element is BOOL:
        mask = b.bit_and(seen, bias)
    else:
        mask = b.select(seen, bias, -math.inf)
    if mask is None or mask.type.element is BOOL:
        return mask
    return b.cast_to(mask, q.element)


def by_parts(c: Context, q: Value, k: Value, v: Value, scale: float, seen: Value | None, bias: Value | None):
    """The result, and the scores at the stage that the node wants to see."""
    b, mode, cap = c.b, c.attribute("qk_matmul_output_mode", 0), c.attribute("softcap")
    element, root = q.type.element, math.sqrt(scale)
    scores = b.contract(b.mul(q, root), b.mul(k, root), spec="ahmk,ahnk->ahmn")
    stages = [scores]
    if cap:
        scores = b.mul(b.tanh(b.div(scores, cap)), cap)
    stages.append(scores)
    if bias is not None:
        masked = bias.type.element is BOOL
        scores = b.select(bias, scores, -math.inf) if masked else b.add(scores, b.cast_to(bias, element))
    if seen is not None:
        scores = b.select(seen, scores, -math.inf)
    stages.append(scores)
    precision = element_of(c.attribute("softmax_precision")) if c.attribute("softmax_precision") else element
    if precision is None or precision.kind != "float":
        raise c.wrong("its softmax_precision is no type of floats")
    inner = b.cast_to(scores, precision)
    empty = b.eq(b.amax(inner, dims=(3,), keepdim=True), -math.inf)
    weights = b.cast_to(b.select(empty, 0.0, b.softmax(b.select(empty, 0.0, inner), dim=3)), element)
    stages.append(weights)
    if not 0 <= mode <= 3:
        raise c.wrong(f"its qk_matmul_output_mode is {mode}")
    return b.contract(weights, v, spec="ahmn,ahnk->ahmk"), stages[mode]


@operator("RotaryEmbedding")
def rotary_embedding(c: Context, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None = None):
    b = c.b
    if x.rank == 3:
        heads = c.attribute("num_heads")
        if not heads or x.shape[2] % heads:
            raise c.wrong(f"its num_heads {heads} does not fit a width of {x.shape[2]}")
        value = b.reshape_to(x.value, (*x.shape[:2], heads, x.shape[2] // heads))
    elif x.rank == 4:
        value = b.transpose(x.value, order=(0, 2, 1, 3))
    else:
        raise c.wrong(f"its input has rank {x.rank}, not 3 or 4")
    n, length, _, size = value.type.shape  # [batch, length, heads, size]
    turned = c.attribute("rotary_embedding_dim") or size
    half = turned // 2
    angles = []
    for table in (cos, sin):
        rows = table.value
        if places is not None:
            rows = b.index(rows, [b.cast_to(places.value, I64)], dims=(0,))
        if rows.type.shape[-1] != half or rows.type.rank != 3:
            raise c.wrong(f"its tables {list(table.shape)} do not fit a rotation of {turned} numbers")
        angles.append(b.reshape_to(rows, (*rows.type.shape[:2], 1, half)))
    part = b.slice(value, dim=3, start=0, end=turned) if turned < size else value
    if c.attribute("interleaved"):
        pairs = b.reshape_to(part, (n, length, value.type.shape[2], half, 2))
        first, second = (b.reshape_to(b.slice(pairs, dim=4, start=i, end=i + 1), pairs.type.shape[:4]) for i in (0, 1))
    else:
        first, second = b.slice(part, dim=3, start=0, end=half), b.slice(part, dim=3, start=half, end=turned)
    real = b.sub(b.mul(angles[0], first), b.mul(angles[1], second))
    imaginary = b.add(b.mul(angles[1], first), b.mul(angles[0], second))
    if c.attribute("interleaved"):
        both = b.concat([b.unsqueeze(real, 4), b.unsqueeze(imaginary, 4)], dim=4)
        done = b.reshape_to(both, part.type.shape)
    else:
        done = b.concat([real, imaginary], dim=3)
    if turned < size:
        done = b.concat([done, b.slice(value, dim=3, start=turned, end=size)], dim=3)
    return b.reshape_to(done, x.shape) if x.rank == 3 else b.transpose(done, order=(0, 2, 1, 3))
