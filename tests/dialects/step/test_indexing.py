"""Indexing ops against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .harness import check, forward, gradients, randint, randn


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (), (2, 2, 3)])
def test_embedding(shape, padding):
    check(
        "embedding",
        [randn(5, 4), randint(5, *shape)],
        lambda w, i: F.embedding(i, w, padding if padding >= 0 else None),
        exact="all",
        padding_idx=padding,
    )


def test_embedding_takes_narrow_indices():
    check("embedding", [randn(5, 4), randint(5, 7).int()], lambda w, i: F.embedding(i, w), exact="all")


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("index_shape", [(4, 5, 3), (2, 5, 3), (4, 2, 1), (4, 5, 7)])
def test_gather_and_scatters(dim, index_shape):
    shape = (4, 5, 3)
    fits = [min(i, d) if j != dim else i for j, (i, d) in enumerate(zip(index_shape, shape, strict=True))]
    index = randint(shape[dim], *fits)
    x, src = randn(*shape), randn(*fits, seed=1)
    check("gather", [x, index], lambda x, i: x.gather(dim, i), exact="all", dim=dim)
    check("scatter_add", [x, index, src], lambda x, i, s: x.scatter_add(dim, i, s), exact="all", dim=dim)
    # replaced positions must be distinct for the result to be defined
    if fits[dim] <= shape[dim]:
        index = torch.argsort(randn(*shape, seed=2), dim)[tuple(slice(0, n) for n in fits)]
        check("scatter", [x, index, src], lambda x, i, s: x.scatter(dim, i, s), exact="all", dim=dim)


def test_gather_and_scatter_of_scalars():
    zero = torch.tensor(0)
    check("gather", [randn(), zero], lambda x, i: x.gather(0, i), dim=0)
    check("scatter_add", [randn(), zero, randn(seed=1)], lambda x, i, s: x.scatter_add(0, i, s), dim=0)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_index_add(dim):
    x = randn(4, 5, 3)
    for count in (2, 9):
        shape = [4, 5, 3]
        shape[dim] = count
        index = randint(x.shape[dim], count)
        check(
            "index_add", [x, index, randn(*shape, seed=1)], lambda x, i, s: x.index_add(dim, i, s), exact="all", dim=dim
        )


def take(x, indices, dims):
    full = [slice(None)] * x.dim()
    for d, i in zip(dims, indices, strict=True):
        full[d] = i
    return x[tuple(full)]


CASES = [
    ((0,), [(3,)]),
    ((1,), [(2, 3)]),
    ((2,), [()]),
    ((0, 1), [(3,), (3,)]),
    ((1, 2), [(2, 1), (4,)]),
    ((0, 2), [(3,), (2, 3)]),
    ((0, 1, 3), [(3,), (3,), (3,)]),
    ((0, 1, 2, 3), [(6,), (6,), (6,), (6,)]),
]


@pytest.mark.parametrize(("dims", "shapes"), CASES)
def test_index_and_index_put(dims, shapes):
    x = randn(4, 5, 3, 2)
    indices = [randint(x.shape[d] * 2, *s, seed=d) - x.shape[d] for d, s in zip(dims, shapes, strict=True)]
    check("index", [x, indices], lambda x, i: take(x, i, dims), exact="all", dims=dims)
    place = take(x, indices, dims).shape
    for shape in (place, place[1:], ()):

        def add(x, i, v):
            full = [None] * x.dim()
            for d, t in zip(dims, i, strict=True):
                full[d] = t
            return torch.ops.aten.index_put(x, full, v, True)

        check("index_put", [x, indices, randn(*shape, seed=5)], add, exact="all", dims=dims, accumulate=True)


def test_index_put_that_replaces():
    x, rows, columns = randn(4, 5), torch.tensor([0, 2, -1]), torch.tensor([1, 1, 4])

    def put(x, i, v):
        return torch.index_put(x, tuple(i), v)

    check("index_put", [x, [rows, columns], randn(3, seed=1)], put, exact="all", dims=(0, 1))
    check("index_put", [x, [rows], randn(5, seed=1)], lambda x, i, v: put(x, i, v), exact="all", dims=(0,))


def test_repeated_indices_accumulate():
    x, index = randn(3, 2), torch.tensor([1, 1, 1])
    (dx, _) = gradients("index", [x, [index]], [torch.ones(3, 2).double()], dims=(0,))
    assert dx.tolist() == [[0, 0], [3, 3], [0, 0]]


def test_misfits_are_refused():
    from wholestep.errors import VerifyError

    with pytest.raises(VerifyError, match="depends on data"):
        forward("index", [randn(3, 2), [torch.tensor([True, False, True])]], dims=(0,))
    with pytest.raises(VerifyError, match="dims must rise"):
        forward("index", [randn(3, 2), [randint(2, 4), randint(2, 4)]], dims=(1, 0))
    with pytest.raises(VerifyError, match="one shape"):
        forward("scatter_add", [randn(3, 2), randint(2, 3, 2), randn(2, 2)], dim=0)
    with pytest.raises(VerifyError, match="src must have shape"):
        forward("index_add", [randn(3, 2), randint(2, 4), randn(3, 2)], dim=0)
