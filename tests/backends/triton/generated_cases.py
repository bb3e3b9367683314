"""Generated kernels against the loop dialect's reference in float64.

Run by `test_generate.py` in the interpreter; on a GPU `pytest tests/backends/triton/generated_cases.py` runs the same
natively.
A process has one mode: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.backends.triton.kernels import T, case, function_cases, of_step, rms_grad, step_cases
from tests.dialects.loop.programs import Drawn
from wholestep.backends.generated import overwritable
from wholestep.backends.kernels import Spec
from wholestep.backends.triton import generate
from wholestep.backends.triton.families import Config, Family, Rows, Sums, power_of_two
from wholestep.backends.triton.generate import Candidate
from wholestep.dialects.loop import NoSchedule, outputs_of, schedule
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step.base import torch_dtype
from wholestep.ir.core import Op
from wholestep.ir.types import BF16, F32, I64
from wholestep.transforms.loops import NotLoops, lowered

pytest.importorskip("triton")
DEVICE = torch.device("cpu" if generate.interpreting() else "cuda")
if not generate.interpreting() and not torch.cuda.is_available():
    pytest.skip("generated Triton code needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

STEPS = step_cases()
FUNCTIONS = function_cases()
#: so many tests want all kernels built at once
MANY = 20
#: the interpreter cuts bf16 off instead of rounding it to nearest
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6, torch.float64: 1e-12}


def spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def every_candidate(name: str) -> list[Candidate]:
    """The first guesses of a case, and the configurations it names."""
    it = STEPS[name]
    specs = it.specs(it.tensors())
    assert generate.why_not(it.kernel, specs) == ""
    family = Family(it.kernel, specs)
    return [*generate.candidates(it.kernel, specs)[:1], *(generate.candidate(family, c) for c in it.configs)]


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> dict[str, Callable[..., None] | Exception]:
    """On a GPU all kernels are built at once, in parallel, unless few tests were asked for."""
    if generate.interpreting() or len(request.session.items) < MANY:
        return {}
    wanted = [c for name in STEPS for c in every_candidate(name)]
    for kernel, inputs, out in FUNCTIONS.values():
        wanted.append(function_candidate(kernel, inputs, out)[0])
    return generate.build(list({c.key: c for c in wanted}.values()))


def ready(built: dict[str, Callable[..., None] | Exception], candidate: Candidate) -> Callable[..., None]:
    found = built.get(candidate.key) or generate.build([candidate])[candidate.key]
    if isinstance(found, Exception):
        raise found
    return found


def on_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    moved = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE) for t in tensors]
    for to, t in zip(moved, tensors, strict=True):
        if 0 not in t.stride():
            to.copy_(t)
        else:
            to.as_strided(t[:1].shape, t.stride()).copy_(t[:1])
    return moved


def scratch_of(candidate: Candidate) -> list[torch.Tensor]:
    return [torch.full(s.shape, 77, dtype=s.dtype, device=DEVICE) for s in candidate.scratch]


def close(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    if got.dtype not in ROUNDING:
        assert torch.equal(got.cpu(), want)
        return
    r = ROUNDING[got.dtype] * scale
    torch.testing.assert_close(got.cpu(), want, rtol=r, atol=max(r, 1e-37) if scale > 1 else 1e-37, equal_nan=True)


def test_few_rows_side_by_side_are_for_many_programs():
    """Rows of 1568 pixels, one per channel, channels last: by 64 they would be for four programs of many steps."""
    centred = lambda b, x: b.sub(x, b.mean(x, dims=(0, 2, 3), keepdim=True))  # noqa: E731
    it = case([T(8, 256, 14, 14, e=BF16)], centred, {0: (0, 2, 3, 1), 1: (0, 2, 3, 1)})
    first = generate.candidates(it.kernel, it.specs(it.tensors()))[0]
    assert first.functions[0].grid == 64 and first.functions[0].warps == 16


@pytest.mark.parametrize("name", STEPS)
def test_kernel(name, built):
    it = STEPS[name]
    tensors = it.tensors()
    count = len(tensors) - len(outputs_of(it.kernel))
    want = [t.clone() for t in tensors[count:]]
    run(it.kernel, tensors[:count], want)
    for candidate in every_candidate(name):
        given = on_device(tensors)
        for t in given[count:]:
            t.fill_(3)
        ready(built, candidate)(*given, *scratch_of(candidate))
        for got, right in zip(given[count:], want, strict=True):
            close(got, right, 4.0)


def drawn_kernels() -> dict[int, tuple[Op, Drawn]]:
    """Kernels with reductions that nobody thought of."""
    found = {}
    for seed in range(34):
        drawn = Drawn(seed, ops=3 + seed % 9, float64=False)
        with contextlib.suppress(NotLoops, NoSchedule):
            kernel = lowered(drawn.function)
            walk = schedule(kernel)
            if (walk.along or walk.across) and math.prod(walk.sizes) < 500:
                found[seed] = kernel, drawn
    return found


def in_parts(family: Family) -> Config:
    """A configuration that has several programs where there is anything to share."""
    rows, length = power_of_two(max(family.count, 1)), power_of_two(max(family.length, 1))
    if family.kind == "sums":
        return Sums(max(rows // 4, 1), max(length // 2, 1), 2, 4)
    return Rows(max(rows // 4, 1), length, 4, programs=2)


def test_kernels_that_are_drawn(built):
    kernels = drawn_kernels()
    assert len(kernels) > 6
    for seed, (kernel, drawn) in kernels.items():
        want = [torch.full(v.type.shape, 3.0, dtype=torch_dtype(v.type.element)) for v in drawn.results]
        given = on_device([*drawn.inputs, *want])
        specs = [spec(t) for t in given]
        run(kernel, drawn.inputs, want)
        family = Family(kernel, specs)
        if family.kind == "pointwise":  # sums of one element are none
            continue
        way = generate.candidate(family, in_parts(family))
        ready(built, way)(*given, *scratch_of(way))
        for got, right in zip(given[len(drawn.inputs) :], want, strict=True):
            torch.testing.assert_close(
                got.cpu(), right, rtol=1e-4, atol=1e-4, msg=lambda m, s=f"{seed} {way.name}": f"{s}: {m}"
            )


def function_candidate(kernel, inputs, out):
    tensors = [*inputs, torch.empty(len(inputs[0]), dtype=torch_dtype(out))]
    specs = [spec(t) for t in tensors]
    assert generate.why_not(kernel, specs) == ""
    return generate.candidates(kernel, specs)[0], tensors


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name, built):
    kernel, inputs, out = FUNCTIONS[name]
    candidate, tensors = function_candidate(kernel, inputs, out)
    want = tensors[-1].clone()
    if name == "trunc_div_f32":  # the quotient is rounded before it is cut
        want = torch.div(*inputs, rounding_mode="trunc")
    else:
        run(kernel, tensors[:-1], [want])
    given = on_device(tensors)
    ready(built, candidate)(*given)
    close(given[-1], want)


@pytest.mark.parametrize("shape", [(9, 18), (0, 18), (6, 0), (1, 5), (5, 1)])
def test_sums_and_products_as_torch(shape, built):
    """Also over nothing, where every sum has its neutral value."""
    x = torch.randn(shape)
    for dims in ((0,), (1,), (0, 1)):
        kernel = of_step([T(*shape)], lambda b, x, d=dims: [b.sum(x, dims=d), b.prod(x, dims=d)])
        right = x.sum(dims), x.prod(0) if dims == (0,) else x.prod(1) if dims == (1,) else x.prod()
        given = on_device([x, *(torch.full_like(r, 9) for r in right)])
        for candidate in generate.candidates(kernel, [spec(t) for t in given])[:2]:
            ready(built, candidate)(*given, *scratch_of(candidate))
            for got, want in zip(given[1:], right, strict=True):
                torch.testing.assert_close(got.cpu(), want)


def test_no_rows(built):
    """Rows and sums over them, where there is no row."""
    kernel = of_step([T(0, 21), T(0, 21), T(21)], rms_grad)
    given = on_device([torch.empty(0, 21), torch.empty(0, 21), torch.ones(21), torch.empty(0, 21), torch.ones(21)])
    candidate = generate.candidates(kernel, [spec(t) for t in given])[0]
    ready(built, candidate)(*given, *scratch_of(candidate))
    assert not given[4].any()


def loss_and_gradient(b, x, target):
    """Cross entropy, which looks one number of each row up, and softmax less one where the target is."""
    loss, logsumexp = b.cross_entropy(x, target, reduction="sum")
    rows, classes = x.type.shape
    at = b.eq(
        b.reshape(target, shape=(rows, 1)),
        b.reshape(b.iota(start=0, stride=1, type=T(classes, e=I64)), shape=(1, classes)),
    )
    return [loss, b.sub(b.exp(b.sub(x, b.reshape(logsumexp, shape=(rows, 1)))), b.cast(at, dtype=F32))]


@pytest.mark.parametrize(
    "config", [None, Rows(1, 8, 1, looped=True, programs=3), Rows(4, 16, 1, looped=True, programs=2)]
)
def test_a_gradient_over_its_logits(config, built):
    it = case([T(13, 37), T(13, e=I64)], loss_and_gradient, {}, (), 37)
    inputs = it.tensors()
    logits, target, loss, gradient = on_device(inputs)
    specs = it.specs(inputs)
    assert overwritable(it.kernel, specs[:2], specs[2:]) == [set(), {0}]
    family = Family(it.kernel, specs)
    way = generate.candidates(it.kernel, specs)[0] if config is None else generate.candidate(family, config)
    launch = ready(built, way)
    launch(logits, target, loss, gradient, *scratch_of(way))
    wanted = [loss.clone(), gradient.clone()]
    launch(logits, target, loss, logits, *scratch_of(way))
    assert torch.equal(loss, wanted[0]) and torch.equal(logits, wanted[1])


def test_nan_and_infinity_in_rows(built):
    """As torch: a NaN spreads, a row of -inf alone is NaN, -inf beside numbers is 0."""
    x = torch.randn(4, 21)
    x[0, 3], x[1], x[2, 5] = float("nan"), float("-inf"), float("-inf")
    for it in (STEPS["softmax"], case([T(4, 21)], lambda b, x: b.amax(x, dims=(1,)))):
        kernel = of_step([T(4, 21)], lambda b, x: b.softmax(x, dim=1)) if it is STEPS["softmax"] else it.kernel
        right = torch.softmax(x, 1) if it is STEPS["softmax"] else x.amax(1)
        given = on_device([x, torch.empty_like(right)])
        family = Family(kernel, [spec(t) for t in given])
        configs = it.configs if it is STEPS["softmax"] else ()
        for c in (generate.candidates(kernel, family.walk.specs)[0], *(generate.candidate(family, c) for c in configs)):
            ready(built, c)(*given, *scratch_of(c))
            torch.testing.assert_close(given[1].cpu(), right, equal_nan=True)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("element", [F32, BF16], ids=str)
def test_a_maximum_and_the_exponentials_below_it_from_one_walk(element, guarded, built):
    """Numbers that grow and fall along a row, rows of the least number, of infinities, with a NaN."""
    dtype, least = {F32: torch.float32, BF16: torch.bfloat16}[element], torch.finfo(torch.float32).min
    x = torch.randn(9, 53) * 4
    x[0], x[1], x[2], x[3] = torch.arange(53.0), -torch.arange(53.0), least, float("-inf")
    x[4, :40], x[5, 7], x[6, 50], x[7, 1:] = least, float("nan"), float("inf"), float("-inf")
    x = x.to(dtype)

    def both(b, x):
        wide = b.cast(x, dtype=F32)
        most = b.amax(wide, dims=(1,), keepdim=True)
        most = b.select(b.eq(b.abs(most), float("inf")), 0.0, most) if guarded else most
        total = b.sum(b.exp(b.sub(wide, most)), dims=(1,), keepdim=True)
        return [total, b.exp(b.sub(wide, b.add(b.log(total), most)))]

    most = x.float().amax(1, keepdim=True)
    most = torch.where(most.abs() == float("inf"), 0.0, most) if guarded else most
    total = torch.exp(x.float() - most).sum(1, keepdim=True)
    right = [total, torch.exp(x.float() - (total.log() + most))]
    kernel = of_step([T(9, 53, e=element)], both)
    given = on_device([x, *map(torch.empty_like, right)])
    family = Family(kernel, [spec(t) for t in given])
    for config in (Rows(1, 16, 1, looped=True), Rows(1, 64, 1, looped=True), Rows(1, 4, 1, looped=True, stages=3)):
        candidate = generate.candidate(family, config)
        assert candidate.source.count("for c0 in") == 2  # and one to write
        ready(built, candidate)(*given, *scratch_of(candidate))
        for found, want in zip(given[1:], right, strict=True):
            torch.testing.assert_close(found.cpu(), want, equal_nan=True)


def test_random_numbers_are_those_of_torch_ops(built):
    """Bit for bit, by whole blocks of words and one by one."""
    for shape in ((6, 8), (5, 7)):
        key = torch.tensor([-3, (5 << 32) + 9, 12])
        draw = lambda b, k, s=shape: b.random(k, distribution="uniform", stream=7, type=T(*s))  # noqa: E731
        kernel = of_step([T(3, e=I64)], draw)
        want, got = torch.empty(shape), torch.empty(shape)
        torch.ops.wholestep.random_(want, key, "uniform", 7)
        given = on_device([key, got])
        for candidate in generate.candidates(kernel, [spec(t) for t in given]):
            ready(built, candidate)(*given)
            assert torch.equal(given[1].cpu(), want)


def update(b, p, g, m, rate):
    m = b.add(b.mul(m, 0.9), b.cast(g, dtype=F32))
    p = b.sub(p, b.mul(rate, b.div(m, b.add(b.abs(m), 0.5))))
    return p, m, b.cast(p, dtype=BF16)


def test_batch(built):
    kernels, tensors, want = [], [], []
    torch.manual_seed(0)
    for shape in ((3, 5), (1030,), (4, 512), (7, 2, 2)):
        kernel = of_step([T(*shape), T(*shape, e=BF16), T(*shape), T()], update)
        own = [torch.rand(a.type.shape).to(torch_dtype(a.type.element)) for a in kernel.regions[0].block.arguments]
        right = [t.clone() for t in own[4:]]
        run(kernel, own[:4], right)
        kernels.append((kernel, [spec(t) for t in own]))
        tensors += own
        want += own[:4] + right
    assert len({generate.batch_key(*k) for k in kernels}) == 1
    candidate = generate.batch(kernels)
    given = on_device(tensors)
    call = ready(built, candidate)
    for _ in range(2):  # the second time from the same tables
        call(*given)
        for got, right in zip(given, want, strict=True):
            close(got, right, 4.0)
    moved = [t.clone() for t in given]
    for t in moved:
        t.view(-1)[0] = 5
    call(*moved)
    assert not torch.equal(moved[4], given[4])  # new addresses, new results


def test_tensors_that_start_anywhere(built):
    """A view that does not start at a multiple of 16 bytes."""
    it = case([T(16, 8), T(16, 8)], lambda b, x, y: b.add(x, y))
    room = on_device([torch.randn(129) for _ in range(3)])
    views = [t[1:].view(16, 8) for t in room]
    (candidate, *_) = generate.candidates(it.kernel, [spec(t) for t in views])
    ready(built, candidate)(*views)
    torch.testing.assert_close(views[2], views[0] + views[1])
