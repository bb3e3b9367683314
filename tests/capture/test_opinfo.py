"""Every op of PyTorch's test database: captured values and float64 gradients equal eager's, or a clear refusal.

Each op is also compared with its row in docs/coverage.md, so that the page never promises more, or less, than is true.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.capture import coverage
from tests.capture.opinfo import ALL_SAMPLES, WRONG, database, examine, import_function, targets, title, trace

torch.set_num_threads(1)
DATABASE = {title(info): info for info in database()}
VERSION, ROWS, COUNTS = coverage.committed()
STALE = "docs/coverage.md is not current: run `make coverage-docs`"
SAME_TORCH = torch.__version__.partition("+")[0] == VERSION


def chosen(number: int, name: str) -> bool:
    """Every fifth op that rules cover runs with every change, every tenth of the others; WHOLESTEP_OPINFO=all: all."""
    if os.environ.get("WHOLESTEP_OPINFO") == "all" or ALL_SAMPLES:
        return True
    return number % (5 if " | by rule | " in ROWS.get(name, "") else 10) == 0


CHOSEN = [name for number, name in enumerate(DATABASE) if chosen(number, name)]


@pytest.mark.parametrize("name", CHOSEN)
def test_op(name):
    verdict = examine(DATABASE[name])
    assert verdict.status != WRONG, "\n".join(verdict.reasons)
    if SAME_TORCH and not ALL_SAMPLES:
        assert coverage.row(verdict) == ROWS.get(name), STALE


def test_page_counts():
    """The page's counts are those of its rows, and it has a row for every op."""
    kinds = [row.split(" | ")[1] for row in ROWS.values()]
    assert coverage.summary(kinds) == COUNTS, STALE
    if SAME_TORCH:
        assert list(ROWS) == list(DATABASE), STALE


class Sampler(torch.nn.Module):
    """Composite, in-place, view and random calls, as models make them."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.batch = torch.nn.BatchNorm1d(6)

    def forward(self, x, index):
        y = torch.nn.functional.gelu(self.linear(x))
        y = self.norm(y).reshape(2, 3, 2, 6).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
        y = self.batch(y.flatten(0, 2)).clone()
        y[:, 1:3].mul_(2.0)
        y[index] = 0.5
        return torch.nn.functional.cross_entropy(torch.einsum("ij,kj->ik", y, y), index.repeat(3))


def test_trace_is_what_export_gives():
    """The samples are traced as torch.export would trace them: the same ATen calls in the same order."""
    torch.manual_seed(0)
    model, inputs = Sampler(), (torch.randn(12, 6), torch.tensor([1, 3, 5, 7]))
    exported = torch.export.export(model, inputs, strict=False)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def function(*tensors):
        given = dict(zip(state, tensors, strict=False))
        return torch.func.functional_call(model, given, tensors[len(state) :])

    tensors = [*state.values(), *inputs]
    traced = trace(function, tensors)
    assert targets(traced) == targets(exported.graph_module)
    assert import_function(traced, tensors).results
