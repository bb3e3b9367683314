"""Random numbers by formula: Philox4x32-10 (Salmon et al. 2011), the same bits on every device and by every provider.

Block j of a stream is four 32-bit words, made from the counter (j, stream, step, micro-batch) under the run's seed as
the key. It is written here in torch integer ops on chunks that stay in cache; nothing is kept between two calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LOW = 0xFFFFFFFF
#: words made at a time: as many as fit in the cache of one core, or as fill a GPU
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}

DISTRIBUTIONS = ("uniform", "normal", "exponential")


def draw(
    distribution: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    key: Sequence[int],
    stream: int,
    device: torch.device | str | None = None,
    chunk: int = 0,
) -> torch.Tensor:
    """A tensor of random numbers; `key` is (seed, step counter, micro-batch index). `chunk` changes speed alone.

    Element i, in row-major order, takes word i (word i % 4 of block i // 4); a float64 takes words 2i and 2i + 1.
    """
    out = torch.empty(shape, dtype=dtype, device=device)
    draw_into(out, distribution, key, stream, chunk)
    return out


def draw_into(out: torch.Tensor, distribution: str, key: Sequence[int], stream: int, chunk: int = 0) -> None:
    """Fills a tensor that lies row by row with random numbers."""
    flat, per_element = out.view(-1), words_per_element(out.dtype)
    counter, keys = counter_words(key, stream), key_words(key[0])
    if not chunk:
        chunk = CHUNK.get(out.device.type, CHUNK["cpu"]) * (torch.get_num_threads() if out.device.type == "cpu" else 1)
    step = max(chunk // (4 * per_element), 1) * 4  # elements, in whole blocks
    lanes: Lanes | None = None
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        blocks = -(-part.numel() * per_element // 4)
        if lanes is None or lanes.blocks != blocks:
            lanes = Lanes(blocks, out.device)
        fill(part, philox(lanes, start * per_element // 4, counter, keys), distribution)


#: `torch.ops.wholestep.random_` writes where it is told; a provider may bring a kernel for its device
OPERATORS = torch.library.Library("wholestep", "DEF")
OPERATORS.define("random_(Tensor(a!) out, Tensor key, str distribution, int stream) -> ()")


def _random(out: torch.Tensor, key: torch.Tensor, distribution: str, stream: int) -> None:
    draw_into(out, distribution, key.tolist(), stream)


OPERATORS.impl("random_", _random, "CompositeExplicitAutograd")
OPERATORS.impl("random_", lambda out, key, distribution, stream: None, "Meta")


def words_per_element(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.float64 else 1


def counter_words(key: Sequence[int], stream: int) -> tuple[int, int, int]:
    """The last three words of the counter: stream, step counter, micro-batch with the step counter's upper bits."""
    _, step, micro_batch = key
    if not (0 <= stream <= LOW and 0 <= step < 1 << 48 and 0 <= micro_batch < 1 << 16):
        raise ValueError(
            f"random numbers are made for streams below 2**32, steps below 2**48 and micro-batches below 2**16; "
            f"this is stream {stream}, step {step}, micro-batch {micro_batch}"
        )
    return stream, step & LOW, micro_batch | step >> 32 << 16


def key_words(seed: int) -> tuple[int, int]:
    return seed & LOW, seed >> 32 & LOW


# ---- the generator ---------------------------------------------------------------------------------------------------


class Lane:
    """A vector of 64-bit integers, with its halves as vectors of 32-bit integers."""

    __slots__ = ("high", "low", "whole")

    def __init__(self, whole: torch.Tensor):
        halves = whole.view(torch.int32).view(-1, 2)
        self.whole, self.low, self.high = whole, halves[:, 0], halves[:, 1]


@dataclass(slots=True, init=False)
class Lanes:
    """The memory of one chunk: words (upper half zero), products of words, and the result."""

    blocks: int
    words: list[Lane]
    products: list[Lane]
    result: torch.Tensor

    def __init__(self, blocks: int, device: torch.device):
        self.blocks = blocks
        self.words = [Lane(torch.zeros(blocks, dtype=torch.int64, device=device)) for _ in range(2)]
        self.products = [Lane(torch.empty(blocks, dtype=torch.int64, device=device)) for _ in range(4)]
        self.result = torch.empty(blocks, 4, dtype=torch.int32, device=device)


def philox(lanes: Lanes, first: int, counter: tuple[int, int, int], key: tuple[int, int]) -> torch.Tensor:
    """The words of blocks `first`, `first + 1`, ... as one vector of 32-bit integers, valid until the next call.

    Of a word only the lower half of a lane counts, so a product serves as its own lower word and no pass is spent on
    masks. Words that are the same in all blocks (most of the counter, for three rounds) stay Python integers.
    """
    words, products = lanes.words, lanes.products
    block = words.pop()
    torch.arange(first, first + lanes.blocks, out=block.whole)
    a: Lane | int = block
    b: Lane | int
    c: Lane | int
    d: Lane | int
    b, c, d = counter
    for k0, k1 in key_schedule(key):
        p, q = times(a, MULTIPLIERS[0], products), times(c, MULTIPLIERS[1], products)
        give_back(words, a, c)
        a, c = mixed(q, b, k0, words), mixed(p, d, k1, words)
        give_back(products, b, d)
        b, d = q, p
    for column, word in zip(lanes.result.unbind(1), (a, b, c, d), strict=True):
        assert isinstance(word, Lane)
        column.copy_(word.low)
    give_back(words, a, c)
    give_back(products, b, d)
    return lanes.result.view(-1)


def key_schedule(key: tuple[int, int]) -> list[tuple[int, int]]:
    """The key of each round."""
    (k0, k1), (s0, s1) = key, KEY_STEPS
    return [(k0 + i * s0 & LOW, k1 + i * s1 & LOW) for i in range(ROUNDS)]


def times(word: Lane | int, factor: int, products: list[Lane]) -> Lane | int:
    """The 64-bit product of a word."""
    if isinstance(word, int):
        return (word & LOW) * factor
    product = products.pop()
    torch.mul(word.whole, factor, out=product.whole)
    return product


def mixed(product: Lane | int, word: Lane | int, key: int, words: list[Lane]) -> Lane | int:
    """The upper half of a product, a word and a key, joined by exclusive or."""
    if isinstance(product, int) and isinstance(word, int):
        return (product >> 32 ^ word ^ key) & LOW
    out = words.pop()
    if isinstance(product, int):
        assert isinstance(word, Lane)
        torch.bitwise_xor(word.low, signed(product >> 32 ^ key), out=out.low)
    elif isinstance(word, int):
        torch.bitwise_xor(product.high, signed(word ^ key), out=out.low)
    else:
        torch.bitwise_xor(product.high, word.low, out=out.low)
        out.whole.bitwise_xor_(key)
    return out


def signed(word: int) -> int:
    """The lower 32 bits as a signed integer of 32 bits."""
    return ((word & LOW) ^ 1 << 31) - (1 << 31)


def give_back(pool: list[Lane], *words: Lane | int) -> None:
    pool.extend(w for w in words if isinstance(w, Lane))


# ---- distributions ---------------------------------------------------------------------------------------------------


def digits(dtype: torch.dtype) -> int:
    """Bits of a uniform number: as many as make every multiple of 2**-digits in [0, 1) exact."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def fill(out: torch.Tensor, words: torch.Tensor, distribution: str) -> None:
    """Turns words into numbers. `words` are whole blocks, so they may be a few more than `out` takes."""
    if distribution == "uniform":
        fractions(out, words)
        return
    exact = out.dtype if out.dtype in (torch.float32, torch.float64) else torch.float32
    numbers = torch.empty(words.numel() // words_per_element(exact), dtype=exact, device=out.device)
    fractions(numbers, words, inner=True)
    if distribution == "exponential":
        numbers.log_().neg_()
    else:
        box_muller(numbers)
    out.copy_(numbers[: out.numel()])


def fractions(out: torch.Tensor, words: torch.Tensor, inner: bool = False) -> None:
    """The upper bits of each word as a fraction in [0, 1); with `inner` one bit less and a half, in (0, 1).

    A float64 takes 27 bits of its first word and the rest of its second. Changes `words`.
    """
    bits = digits(out.dtype) - inner
    if out.dtype is torch.float64:
        pairs = words.view(-1, 2)[: out.numel()]
        upper, lower = pairs[:, 0] >> 5 & (1 << 27) - 1, pairs[:, 1] >> 59 - bits & (1 << bits - 27) - 1
        out.copy_(upper).mul_(2.0 ** (bits - 27)).add_(lower)
    else:
        out.copy_(words[: out.numel()].bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1))
    out.mul_(2.0**-bits)
    if inner:
        out.add_(2.0 ** -(bits + 1))


def box_muller(numbers: torch.Tensor) -> None:
    """Standard normal numbers from uniform ones, in place: each pair is a radius and an angle."""
    pairs = numbers.view(-1, 2)
    radius, angle = pairs.t().contiguous()
    radius.log_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi)
    torch.mul(radius, angle.cos(), out=pairs[:, 0])
    torch.mul(radius, angle.sin_(), out=pairs[:, 1])
