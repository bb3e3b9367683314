"""`step.random`: the bits of Philox4x32-10, where each goes, what the numbers look like, and that nothing is shared."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch

from tests import warm
from tests.dialects.step.harness import run
from wholestep.backends.aten import lower
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.philox import DISTRIBUTIONS, LOW, Lanes, draw, fill, philox
from wholestep.errors import VerifyError
from wholestep.ir import BF16, F32, F64, I64, TensorType, add_function, finish_function, module, verify

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
N = 1 << 16


def words(counter, key, blocks=1):
    """Words of our generator as Python integers."""
    first, *rest = counter
    return [w & LOW for w in philox(Lanes(blocks, CPU), first, tuple(rest), key).tolist()]


def reference(counter, key):
    """Philox4x32-10 on Python integers, as the paper writes it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & LOW, p >> 32 ^ c[3] ^ k[1], p & LOW]
        k = [k[0] + 0x9E3779B9 & LOW, k[1] + 0xBB67AE85 & LOW]
    return c


def uniform(key=(0, 0, 0), stream=1, n=N, dtype=torch.float32):
    return draw("uniform", (n,), dtype, key, stream)


# ---- the bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((LOW, LOW, LOW, LOW), (LOW, LOW), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert " ".join(f"{w:08x}" for w in words(counter, key)) == expected
    assert reference(counter, key) == [int(w, 16) for w in expected.split()]


@pytest.mark.parametrize("counter", [(0, 1, 0, 0), (77, 0, LOW, 3), (1 << 31, LOW, 5, LOW)])
def test_blocks_are_those_of_the_paper(counter):
    key = (0xDEADBEEF, 0x80000001)
    first, *rest = counter
    expected = [w for j in range(3) for w in reference((first + j, *rest), key)]
    assert words(counter, key, 3) == expected


TRITON = """
import json, torch, triton, triton.language as tl

@triton.jit
def kernel(out, seed, c1, c2, c3, n: tl.constexpr):
    at = tl.arange(0, n)
    zero = (at * 0).to(tl.uint32)
    a, b, c, d = tl.philox(seed, at.to(tl.uint32), zero + c1, zero + c2, zero + c3)
    tl.store(out + 4 * at, a.to(tl.int32, bitcast=True))
    tl.store(out + 4 * at + 1, b.to(tl.int32, bitcast=True))
    tl.store(out + 4 * at + 2, c.to(tl.int32, bitcast=True))
    tl.store(out + 4 * at + 3, d.to(tl.int32, bitcast=True))

out = torch.empty(64, dtype=torch.int32)
kernel[(1,)](out, SEED, 7, 11, 13, 16)
print(json.dumps(out.tolist()))
"""


def test_triton_makes_the_same_words(tmp_path):
    pytest.importorskip("triton")
    seed = 0x0123456789ABCDEF
    script = tmp_path / "kernel.py"  # Triton reads a kernel's source from its file
    script.write_text(TRITON.replace("SEED", str(seed)))
    done = warm.run([str(script)], os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    ours = words((0, 7, 11, 13), (seed & LOW, seed >> 32), 16)
    assert [w & LOW for w in json.loads(done.stdout)] == ours


# ---- where each word goes --------------------------------------------------------------------------------------------

KEY = (-3, (5 << 32) + 9, 12)  # a seed with all upper bits, a step that needs two words
STREAM = 0xFFFFFFFE


def expected_words(count):
    seed = KEY[0] & (1 << 64) - 1
    counter = (STREAM, 9, 12 | 5 << 16)
    return [w for j in range(-(-count // 4)) for w in reference((j, *counter), (seed & LOW, seed >> 32))][:count]


def test_an_element_takes_its_word():
    got = draw("uniform", (2, 5), torch.float32, KEY, STREAM)
    assert got.flatten().tolist() == [(w >> 8) / 2**24 for w in expected_words(10)]


def test_a_float64_takes_two_words():
    got, w = draw("uniform", (7,), torch.float64, KEY, STREAM), expected_words(14)
    assert got.tolist() == [((w[2 * i] >> 5) * 2**26 + (w[2 * i + 1] >> 6)) / 2**53 for i in range(7)]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_short_floats_take_fewer_bits(dtype, bits):
    got = draw("uniform", (9,), dtype, KEY, STREAM)
    assert got.tolist() == [(w >> 32 - bits) / 2**bits for w in expected_words(9)]


def test_normal_is_box_muller_and_exponential_a_logarithm():
    u = [((w >> 9) + 0.5) / 2**23 for w in expected_words(8)]
    pairs = [(math.sqrt(-2 * math.log(u[i])), 2 * math.pi * u[i + 1]) for i in range(0, 8, 2)]
    normal = [r * f(a) for r, a in pairs for f in (math.cos, math.sin)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted = torch.tensor(normal[:7]), torch.tensor([-math.log(x) for x in u[:7]])
        for distribution, want in zip(("normal", "exponential"), wanted, strict=True):
            got = draw(distribution, (7,), dtype, KEY, STREAM)
            torch.testing.assert_close(got, want.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_chunks_do_not_show(distribution, dtype):
    whole = draw(distribution, (1003,), dtype, KEY, 1, chunk=1 << 20)
    for chunk in (1, 12, 64, 1000):
        assert torch.equal(draw(distribution, (1003,), dtype, KEY, 1, chunk=chunk), whole), chunk
    assert torch.equal(draw(distribution, (17, 59), dtype, KEY, 1).flatten(), whole)
    assert torch.equal(draw(distribution, (10,), dtype, KEY, 1), whole[:10])  # nor does the size


def test_the_default_chunk_does_not_show():
    assert torch.equal(uniform(n=3 << 17), draw("uniform", (3 << 17,), torch.float32, (0, 0, 0), 1, chunk=1000))


def test_shapes():
    assert draw("normal", (), torch.float32, KEY, 1).shape == ()
    assert draw("normal", (3, 0, 2), torch.float64, KEY, 1).shape == (3, 0, 2)


# ---- range -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("word", [0, -1, 1, 1 << 30, -(1 << 31)])
def test_limits(dtype, word):
    """Every number is in range and finite, at the ends of what a word can hold."""
    numbers = {}
    for distribution in DISTRIBUTIONS:
        numbers[distribution] = out = torch.empty(2, dtype=dtype)
        fill(out, torch.full((4,), word, dtype=torch.int32), distribution)
        assert out.isfinite().all()
    assert (numbers["uniform"] >= 0).all() and (numbers["uniform"] < 1).all()
    assert (numbers["uniform"] == 0).all() == (word in (0, 1))
    assert (numbers["exponential"] > 0).all()  # its logarithm is finite too: Gumbel noise needs it


def test_the_largest_numbers():
    top = {torch.float32: 1 - 2**-24, torch.float64: 1 - 2**-53, torch.bfloat16: 1 - 2**-8, torch.float16: 1 - 2**-11}
    for dtype, largest in top.items():
        out = torch.empty(2, dtype=dtype)
        fill(out, torch.full((4,), -1, dtype=torch.int32), "uniform")
        assert out.tolist() == [largest, largest]


# ---- statistics (fixed seeds: these cannot fail by chance) -----------------------------------------------------------


def distance(sample, distribution):
    """Kolmogorov and Smirnov's distance times the root of the sample's size: below 1.95 in 999 of 1000 cases."""
    x, _ = sample.double().sort()
    n = x.numel()
    theory = distribution(x)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((theory - steps[:-1]).abs().max(), (theory - steps[1:]).abs().max())) * math.sqrt(n)


THEORY = {
    "uniform": (0.5, 1 / 12, 1 / 180, lambda x: x),
    "normal": (0.0, 1.0, 2.0, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "exponential": (1.0, 1.0, 8.0, lambda x: 1 - torch.exp(-x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("key", [(0, 0, 0), (1, 0, 0), (2**63 - 1, 10**6, 3)])
def test_moments_and_distribution(distribution, dtype, key):
    x = draw(distribution, (N,), dtype, key, 1).double()
    mean, variance, spread, theory = THEORY[distribution]  # spread: the variance of (x - mean)**2
    assert abs(float(x.mean()) - mean) < 4 * math.sqrt(variance / N)
    assert abs(float((x - mean).square().mean()) - variance) < 4 * math.sqrt(spread / N)
    assert distance(x, theory) < 1.95


def test_short_normal_and_exponential_keep_their_moments():
    for dtype in (torch.bfloat16, torch.float16):
        for distribution in ("normal", "exponential"):
            x = draw(distribution, (N,), dtype, (0, 0, 0), 1).double()
            mean, variance = THEORY[distribution][:2]
            assert abs(float(x.mean()) - mean) < 0.02 and abs(float(x.var()) - variance) < 0.03


def test_the_distance_would_notice_a_wrong_distribution():
    assert distance(uniform() ** 1.05, lambda x: x) > 1.95


def chi_square(counts):
    """(statistic - degrees of freedom) in units of its standard deviation."""
    counts = counts.double()
    expected = counts.sum() / counts.numel()
    free = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free)


def test_bits_bytes_and_bins():
    made = torch.tensor(words((0, 1, 2, 3), (4, 5), N // 4))
    for bit in range(32):
        ones = int((made >> bit & 1).sum())
        assert abs(ones - N / 2) < 4 * math.sqrt(N / 4), bit
    for shift in (0, 8, 16, 24):
        assert abs(chi_square(torch.bincount(made >> shift & 255, minlength=256))) < 4
    pairs = (made[0::2] >> 27) * 32 + (made[1::2] >> 27)  # neighbours fill a square evenly
    assert abs(chi_square(torch.bincount(pairs, minlength=1024))) < 4


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


OTHERS = {
    "seed": ((1, 0, 0), 1),
    "upper seed": ((1 << 32, 0, 0), 1),
    "negative seed": ((-1, 0, 0), 1),
    "step": ((0, 1, 0), 1),
    "far step": ((0, 1 << 32, 0), 1),
    "micro-batch": ((0, 0, 1), 1),
    "stream": ((0, 0, 0), 2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_keys_and_streams_are_independent(other):
    x, y = uniform(), uniform(*OTHERS[other])
    assert abs(correlation(x, y)) < 4 / math.sqrt(N)
    assert abs(correlation(x[1:], y[:-1])) < 4 / math.sqrt(N)  # nor is one the other moved by a place
    assert abs(correlation((x - 0.5).square(), (y - 0.5).square())) < 4 / math.sqrt(N)
    cells = (x * 16).long() * 16 + (y * 16).long()
    assert abs(chi_square(torch.bincount(cells, minlength=256))) < 4
    assert len({*x.tolist()} & {*y.tolist()}) < 3 * N * N / 2**24  # and they share no more numbers than chance gives


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 1024])
def test_neighbours_are_independent(lag):
    for x in (uniform(), draw("normal", (N,), torch.float32, (0, 0, 0), 1)):
        assert abs(correlation(x[lag:], x[:-lag])) < 4 / math.sqrt(N)


def test_step_and_micro_batch_do_not_share_counters():
    keys = [(0, step, micro) for step in (0, 1, 1 << 16, 1 << 32, 1 << 47) for micro in (0, 1, 65535)]
    blocks = [tuple(uniform(key, n=4).tolist()) for key in keys]
    assert len(set(blocks)) == len(keys)


# ---- the op ----------------------------------------------------------------------------------------------------------


def random_program(type=None, key=3, **attributes):
    root = module()
    function = add_function(root, "main", [TensorType((key,), I64)])
    block = function.regions[0].block
    type = type or TensorType((2, 3), F32)
    y = StepBuilder(block).random(
        block.arguments[0], **{"distribution": "uniform", "stream": 1, "type": type, **attributes}
    )
    finish_function(function, [y])
    return root, y.op


def test_the_program_draws_what_the_formula_says_and_leaves_torch_alone():
    key, before = torch.tensor([9, 8, 7]), torch.get_rng_state()
    (got,) = run([key], lambda b, k: [b.random(k, distribution="normal", stream=4, type=TensorType((4, 5), BF16))])
    assert torch.equal(got, draw("normal", (4, 5), torch.bfloat16, (9, 8, 7), 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_numbers_are_made_on_the_device_of_the_program():
    _, op = random_program()
    made = lower(op, torch.device("meta")).run(torch.tensor([1, 2, 3]))
    assert made.device.type == "meta" and made.shape == (2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": 2}, "the key is a tensor<3xi64>"),
        ({"stream": 1 << 32}, "the stream is a number from 0"),
        ({"stream": -1}, "the stream is a number from 0"),
        ({"type": TensorType((1 << 17, 1 << 18), F32)}, "one stream holds"),
        ({"type": TensorType((1 << 16, (1 << 17) + 1), F64)}, "one stream holds"),
    ],
)
def test_what_a_random_op_cannot_be(change, message):
    root, _ = random_program(**change)
    with pytest.raises(VerifyError, match=message):
        verify(root)


@pytest.mark.parametrize("key", [(0, -1, 0), (0, 1 << 48, 0), (0, 0, 1 << 16), (0, 0, -1)])
def test_counters_out_of_range_are_refused(key):
    with pytest.raises(ValueError, match="steps below"):
        draw("uniform", (2,), torch.float32, key, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_gpu_makes_the_same_numbers_without_waiting(distribution, dtype):
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = draw(distribution, (1003,), dtype, KEY, 1, "cuda", chunk=400)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = draw(distribution, (1003,), dtype, KEY, 1)
    exact = {"rtol": 0, "atol": 0} if distribution == "uniform" else {}
    torch.testing.assert_close(made.cpu(), expected, **exact)
