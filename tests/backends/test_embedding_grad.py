"""The gradient of an embedding as a template of the provider `triton`: what is taken and refused, sums, whole steps.

Triton reads TRITON_INTERPRET once, when it is imported, so kernels run in a child process that answers with JSON: by
the interpreter, or on the GPU where there is one.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import nn

from tests import warm
from wholestep.backends import embedding
from wholestep.backends.embedding import Config, Places, Problem
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region, Triton, register_provider
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.types import BF16, F32, F64, I32, I64, TensorType

pytest.importorskip("triton")

GUARD = 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Own(Triton):
    """With the template, wherever it is listed."""

    templates = ("embedding",)


def body(element=F32, index=I64, tokens: tuple[int, ...] = (4, 3), rows=20, width=6, padding=-1) -> Op:
    """A function of one gradient."""
    function = add_function(module(), "f", [TensorType((*tokens, width), element), TensorType(tokens, index)])
    block = function.regions[0].block
    dy, indices = block.arguments
    grad = StepBuilder(block, phase="backward").embedding_grad(dy, indices, rows=rows, padding_idx=padding)
    return finish_function(function, [grad])


def region(function: Op, *strides: tuple[int, ...]) -> Region:
    """A region on operands that lie row by row, or as told."""
    arguments = function.regions[0].block.arguments
    shapes = [a.type.shape for a in arguments]
    laid = strides or tuple(row_major(s) for s in shapes)
    dtypes = {F32: torch.float32, BF16: torch.bfloat16, I64: torch.int64, I32: torch.int32}
    types = [dtypes[a.type.element] for a in arguments]
    specs = [Spec(*given) for given in zip(shapes, laid, types, strict=True)]
    return region_of(function, None, specs, torch.device("cpu"))


def test_gradients_of_embeddings_are_regions_of_their_own() -> None:
    def taken(**more: Any) -> bool:
        return Own().takes(next(iter(body(**more).regions[0].block)))

    assert taken() and taken(element=BF16, index=I32, padding=2)
    assert not taken(element=F64)
    assert not taken(tokens=(embedding.MOST_TOKENS + 1,))
    assert not taken(tokens=(0,))
    assert not taken(rows=embedding.MOST_ROWS + 1)
    assert not taken(rows=1)


@pytest.mark.parametrize(
    "onto, more, yes",
    [(0, {}, True), (1, {}, False), (0, {"accumulate": False}, False), (0, {"dims": (1,)}, True)],
)
def test_rows_added_to_zeros_are_the_same_thing(onto: int, more: dict[str, Any], yes: bool) -> None:
    function = add_function(module(), "f", [TensorType((5, 7), F32), TensorType((5,), I64)])
    block = function.regions[0].block
    b = StepBuilder(block, phase="backward")
    values, indices = block.arguments
    if more.get("dims"):
        values = b.transpose(values, order=(1, 0))
    table = b.full(onto, (7, 7), F32)
    grad = b.index_put(table, [indices], values, **{"dims": (0,), "accumulate": True, **more})
    finish_function(function, [grad])
    assert Own().takes(grad.op) == yes
    if yes:
        found = region(function)
        assert Own().claims(found) == ""
        problem = Own().offers(found)[0].made.problem
        assert problem.from_end and (problem.tokens, problem.rows, problem.columns) == (5, 7, 7)
        assert problem.across == bool(more)


def test_tokens_may_lie_apart_but_at_two_distances() -> None:
    plain, columns = region(body()), region(body(tokens=(12,)), (24, 1), (5,))
    transposed, repeated = region(body(), (6, 24, 1), (3, 1)), region(body(), (18, 6, 1), (0, 1))
    for found in (plain, columns, transposed, repeated):
        assert Own().claims(found) == ""
    problem = Own().offers(plain)[0].made.problem
    assert (problem.dy, problem.column, problem.indices) == ((12, 72, 6), 1, (12, 12, 1))
    way = Own().offers(columns)[0].made
    assert (way.problem.dy, way.problem.indices) == ((12, 288, 24), (12, 60, 5))
    assert [f.kernel for f in way.functions] == ["collect_kernel", "sort_kernel", "runs_kernel", "rows_kernel"]
    assert Own().offers(transposed)[0].made.problem.dy == (3, 6, 24)
    assert Own().offers(repeated)[0].made.problem.indices == (3, 0, 1)
    assert "two distances" in Own().claims(region(body(tokens=(2, 3, 4)), (6, 60, 12, 1), (12, 4, 1)))


def test_indices_that_are_computed_or_cut_off_inside_are_refused() -> None:
    for start, why in ((0, ""), (1, "two distances")):
        function = add_function(module(), "f", [TensorType((12, 6), F32), TensorType((13,), I64)])
        block = function.regions[0].block
        b = StepBuilder(block, phase="backward")
        indices = b.slice(block.arguments[1], dim=0, start=start, end=start + 12, stride=1)
        finish_function(function, [b.embedding_grad(block.arguments[0], indices, rows=20, padding_idx=-1)])
        assert why in Own().claims(region(function)) and bool(why) == bool(Own().claims(region(function)))


def test_ways_differ_in_more_than_their_name() -> None:
    for width in (6, 200, 700):
        offers = Own().offers(region(body(width=width)))
        assert len({o.key for o in offers}) == len({o.name for o in offers}) == len(offers) >= 2
        assert len({tuple(f.source for f in o.made.functions) for o in offers}) == len(offers)


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    offers = Own().offers(region(body(BF16, tokens=(300,), width=64), (128, 1), (3,)))[:1]
    assert embedding.depthwise.compile_for(offers, 90) == {}
    kept = [json.loads(p.read_text()) for p in (tmp_path / "triton" / "wholestep").glob("*.json")]
    assert len(kept) == 4 and all(k["spills"] == 0 for k in kept)


# ---- numbers ---------------------------------------------------------------------------------------------------------

SMALL = Config(tile=128, columns=16, few=2, part=8, windows=3, own=8, others=32)
DTYPES = ("float32", "bfloat16", "float16")
#: tokens, rows, columns, dtype of indices, padding, what is drawn
CASES = {
    "odd sizes": (37, 11, 5, "int64", -1, "evenly"),
    "rows nobody names, a row of padding": (50, 90, 17, "int32", 3, "low rows"),
    "one row": (70, 3, 9, "int64", -1, "one"),
    "two long rows": (83, 9, 20, "int64", -1, "two"),
    "a long row of padding": (40, 4, 3, "int64", 2, "one"),
    "one token": (1, 3, 1, "int64", -1, "one"),
    "some rows are no rows": (33, 7, 4, "int64", -1, "outside"),
}


def drawn(how: str, tokens: int, rows: int) -> torch.Tensor:
    uniform = torch.rand(tokens)
    if how == "one":
        return torch.full((tokens,), rows - 2 if rows > 3 else 2)
    if how == "two":
        return torch.arange(tokens) % 2 + rows - 2
    if how == "outside":
        return (uniform * (rows + 6)).long() - 3
    return ((uniform**3 if how == "low rows" else uniform) * rows).long()


def guarded(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN, or of numbers far out, amid the same: what is read or written beside it shows."""
    memory = torch.full((torch.Size(shape).numel() + 2 * GUARD,), float("nan") if dtype.is_floating_point else 1 << 30)
    return memory.to(dtype)[GUARD:-GUARD].view(shape)


def error(case: tuple[int, int, int, str, int, str], name: str, config: Config) -> float:
    """The largest error as a share of what rounding may be; infinite where something is written beside the result."""
    tokens, rows, columns, index_name, padding, how = case
    torch.manual_seed(1)
    dtype, index_dtype = getattr(torch, name), getattr(torch, index_name)
    dy, indices = guarded(tokens, 2, columns + 1, dtype=dtype), guarded(tokens, 3, dtype=index_dtype)
    dy[:, 0, :columns] = torch.randn(tokens, columns).to(dtype)
    indices[:, 0] = drawn(how, tokens, rows).to(index_dtype)
    if how == "evenly":
        indices = indices[:, 0].contiguous()[:, None]
    walks = embedding.walk_of((tokens,), (dy.stride(0),)), 1, embedding.walk_of((tokens,), (indices.stride(0),))
    problem = Problem(tokens, rows, columns, padding, *walks, dtype, index_dtype)
    offer = embedding.offer(problem, Places((0,), (1,), (2,)), config)
    out = guarded(rows, columns, dtype=dtype)
    run = embedding.build([offer])[offer.key]
    assert not isinstance(run, Exception)
    run(dy, indices, out, *(guarded(*s.shape, dtype=s.dtype) for s in offer.scratch))
    own, dy = indices[:, 0].long(), dy[:, 0, :columns].double()
    dy, own = dy[(own >= 0) & (own < rows) & (own != padding)], own[(own >= 0) & (own < rows) & (own != padding)]
    wanted, spread = (torch.zeros(rows, columns).double().index_add_(0, own, x) for x in (dy, dy.abs()))
    memory = out.as_strided((rows * columns + 2 * GUARD,), (1,), 0)
    if not (memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()):
        return float("inf")
    # the interpreter cuts bf16 off instead of rounding it
    rounding = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-7}[name]
    allowed = rounding * wanted.abs() + 1e-6 * spread
    return float(((out.double() - wanted).abs() / allowed.clamp_min(1e-30)).nan_to_num(float("inf")).max())


class Net(nn.Module):
    """Two tables that are looked up in columns of one tensor, one by positions, one that is indexed from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(30, 8), nn.Embedding(5, 8, padding_idx=1)])
        self.places = nn.Embedding(4, 8)
        self.shifts = nn.Parameter(torch.randn(7, 2, 4))

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        looked_up = [table(words[:, i]) for i, table in enumerate(self.tables)]
        shifts = self.shifts[places[:, 0] - 5].flatten(1)
        return torch.stack([*looked_up, shifts, self.places(places).sum(1)], 1).sin().square().mean()


def wrong_pairs(config: Config) -> float:
    """The largest error of x[:, i, j]'s gradient: pairs of indices, some from the end, some named often."""
    torch.manual_seed(2)
    function = add_function(
        module(), "f", [TensorType((3, 5, 13), F32), TensorType((13,), I64), TensorType((13,), I64)]
    )
    block = function.regions[0].block
    b = StepBuilder(block, phase="backward")
    dy, i, j = block.arguments
    put = b.index_put(b.full(0, (3, 5, 4, 6), F32), [i, j], dy, dims=(2, 3), accumulate=True)
    found = region(finish_function(function, [put]))
    assert Own().claims(found) == ""
    problem, places = embedding.problem_of(found) or pytest.fail("it is not taken")
    offer = embedding.offer(problem, places, config)
    run = embedding.build([offer])[offer.key]
    given = torch.randn(3, 5, 13), torch.randint(-4, 4, (13,)), torch.randint(-6, 6, (13,))
    given[1][4:10], given[2][4:10] = 2, -1
    out = guarded(3, 5, 4, 6, dtype=torch.float32)
    run(*given, out, *(guarded(*s.shape, dtype=s.dtype) for s in offer.scratch))
    x = torch.zeros(3, 5, 4, 6, requires_grad=True)
    (wanted,) = torch.autograd.grad(x[:, :, given[1], given[2]], x, given[0])
    return float((out - wanted).abs().max().nan_to_num(float("inf")) / 4e-6)


def wrong_rows(config: Config) -> float:
    """The largest error of the rows of three tables, the gradients and indices of which are parts of two tensors."""
    torch.manual_seed(3)
    tokens, rows, width, tables = 29, 70, 6, 3
    function = add_function(module(), "f", [TensorType((tokens, width), BF16)] * 3 + [TensorType((tokens,), I64)] * 3)
    block = function.regions[0].block
    b = StepBuilder(block, phase="backward")
    made = b.row_sums(block.arguments[:3], block.arguments[3:], rows=rows, padding_idx=2, dtype=F32)
    found = region(finish_function(function, list(made)), *[(tables * width, 1)] * 3, *[(tables,)] * 3)
    assert Own().claims(found) == ""
    problem, places = embedding.problem_of(found) or pytest.fail("it is not taken")
    offer = embedding.offer(problem, places, config)
    run = embedding.build([offer])[offer.key]
    dy, indices = torch.randn(tokens, tables, width).bfloat16(), torch.stack([drawn("low rows", tokens, rows)] * 3, 1)
    indices[:, 1] = drawn("one", tokens, rows)
    indices[7:12, 2] = 2
    given = [*dy.unbind(1), *indices.unbind(1)]
    out = [guarded(*s.shape, dtype=s.dtype) for s in found.results]
    run(*given, *out, *(guarded(*s.shape, dtype=s.dtype) for s in offer.scratch))
    (op,) = [op for op in block if op.name == "step.row_sums"]
    wanted = op.definition.evaluate(op)(*given)
    assert all(torch.equal(a, w) for a, w in zip(out[3:], wanted[3:], strict=True))
    whole = [torch.where(p[:, None] >= 0, s[p.clamp_min(0)], 0) for s, p in zip(out[:3], out[3:], strict=True)]
    gradient = torch.ops.aten.embedding_dense_backward
    dense = [gradient(given[t].float(), given[t + 3], rows, 2, False) for t in range(3)]
    pairs = [*zip(out[:3], wanted[:3], strict=True), *zip(whole, dense, strict=True)]
    return max(float((a - w).abs().max().nan_to_num(float("inf"))) for a, w in pairs) / 1e-5


def child() -> None:
    """Every case in every type with a configuration that has many blocks, one with that of GPUs, then two steps of a
    network."""
    import wholestep as ws

    class Here(Own):
        name, devices = "here", (DEVICE.type,)

    register_provider(Here)
    with DEVICE:
        errors = {f"{name} {dtype}": error(case, dtype, SMALL) for name, case in CASES.items() for dtype in DTYPES}
        errors["pairs"] = max(wrong_pairs(config) for config in (SMALL, embedding.ACROSS[0]))
        errors["rows alone"] = wrong_rows(SMALL)
        errors["as on a GPU"] = error((200, 40, 70, "int64", -1, "low rows"), "float32", Config())
    answer: dict[str, Any] = {"errors": errors}
    torch.manual_seed(0)
    words = torch.stack([torch.randint(0, 30, (24,)), torch.randint(0, 5, (24,))], 1)
    batch = words.to(DEVICE), torch.randint(0, 4, (24, 3)).to(DEVICE)
    losses, models = [], []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = Net().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if compiled:
            providers = ["aten", "here"]
            step = ws.compile(model, lambda m, *b: m(*b), optimizer, batch, providers=providers, tune=False)
            losses.append([float(step(*batch)) for _ in range(2)])
            names = [c.offer for c in step.choices.known.values() if c.provider == "here"]
            answer["used"] = sum(n.startswith("embedding") for n in names)
        else:
            losses.append([])
            for _ in range(2):
                loss = model(*batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[0].append(float(loss))
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    answer["losses"] = losses
    answer["worst"] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    print(json.dumps(answer))


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> dict[str, Any]:
    mode = {"TRITON_INTERPRET": "1"} if DEVICE.type == "cpu" else {}
    environment = {**os.environ, **mode, "WHOLESTEP_CACHE": str(tmp_path_factory.mktemp("cache"))}
    done = warm.run(["-c", "from tests.backends.test_embedding_grad import child; child()"], environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rows_are_the_sums_of_their_tokens(answer: dict[str, Any]) -> None:
    assert len(answer["errors"]) == len(CASES) * len(DTYPES) + 3
    assert max(answer["errors"].values()) <= 1, answer["errors"]


def test_a_step_runs_its_gradients_of_embeddings_and_learns_as_eager_does(answer: dict[str, Any]) -> None:
    assert answer["used"] == 4
    assert answer["losses"][1] == pytest.approx(answer["losses"][0], rel=1e-5)
    assert answer["worst"] < 1e-5
