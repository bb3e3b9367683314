"""`row_gradients`: steps learn the same when gradients of embeddings are rows and places; tables are one op."""

from __future__ import annotations

import torch
from torch import nn

from tests.plan.networks import Case
from wholestep.ir.passes import run_pipeline
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import row_gradients  # noqa: F401  (it registers)
from wholestep.transforms.expand import expanded
from wholestep.transforms.fuse import fuse
from wholestep.transforms.opportunity import take, transformations

NAMES = ("row_gradients",)


class Tables(nn.Module):
    """Three tables of one size that are read by columns, one of another size, and one that has few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(40, 6, padding_idx=3), nn.Embedding(40, 6), nn.Embedding(40, 6)])
        self.large, self.small = nn.Embedding(90, 6), nn.Embedding(5, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        rows = [table(words[:, i]) for i, table in enumerate(self.tables)]
        rows += [self.large(words[:, 3]), self.small(words[:, 0] % 5), self.tables[1](words[:, 3])]
        return torch.stack(rows, 1)


def case_of(**options) -> Case:
    torch.manual_seed(0)
    words = torch.randint(0, 40, (12, 4))
    words[:5, 1], words[2:6, 0] = 7, 3
    return Case(
        (Tables(), lambda y, t: ((y - t).sin() ** 2).mean(), (words, torch.randn(12, 6, 6))), "adamw", **options
    )


def ops(case: Case, name: str) -> list:
    return [op for op in case.program.function.regions[0].block if op.name == name]


def test_tables_of_one_size_are_one_op_and_learn_the_same() -> None:
    for options in ({"precision": "bf16"}, {"clip_norm": 0.01}, {"accumulate": 2}):
        case = case_of(**options)
        before = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
        found = transformations()["row_gradients"].find(case.program.module)
        assert sorted("most of its 5 rows" in o.why_not for o in found) == [False] * 5 + [True]
        assert len(take(case.program.module, NAMES)) == 5
        run_pipeline(case.program.module, "cse,dce")
        verify(case.program.module)
        if "accumulate" not in options:  # (those are in a function of their own)
            assert len(ops(case, "step.embedding_grad")) == 1
            assert sorted(len(op.dys) for op in ops(case, "step.row_sums")) == [1, 1, 3]
        after = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
        for mine, want in zip(after, before, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)


def test_no_kernel_writes_the_whole_gradient() -> None:
    case = case_of(clip_norm=1.0)
    take(case.program.module, NAMES)
    function = expanded(case.program.function)
    fusion = fuse(function, case.numbers)
    assert not [op for op in function.regions[0].block if op.name == "step.spread_rows"]
    for op, names in fusion.kernels:
        if any("spread_rows" in n for n in names) and not any("add" in n for n in names):
            assert op.phase in ("clip", "update")
