"""Attention by measurement: what is wrong or crashes is excluded, the fastest is kept, forward and backward agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wholestep.backends import attentions
from wholestep.backends.attentions import Attentions, corner, formula, made_up, way_by
from wholestep.backends.store import Store
from wholestep.dialects import context
from wholestep.dialects.step import StepBuilder, attention_cuda
from wholestep.dialects.step.attention import kernel_of, kernels_for
from wholestep.ir import BF16, BOOL, F32, TensorType, add_function, finish_function, module, parse, print_module, verify
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable

CPU = torch.device("cpu")
SHAPE = (3, 4, 6, 8)


def program(q=SHAPE, k=None, element=F32, mask=None, mask_element=BOOL, transposed=False, twice=False, **options) -> Op:
    """A module with an attention and its gradients, or two alike; `transposed`: operands come as [B, L, H, D]."""
    types = [TensorType(shape, element) for shape in (q, k or q, k or q)]
    if transposed:
        types = [t.with_shape(tuple(t.shape[i] for i in (0, 2, 1, 3))) for t in types]
    types += [] if mask is None else [TensorType(mask, mask_element)]
    root = module()
    function = add_function(root, "main", types)
    b = StepBuilder(function.regions[0].block, phase="forward")
    operands = list(function.regions[0].block.arguments)
    if transposed:
        operands[:3] = [b.transpose(v, order=(0, 2, 1, 3)) for v in operands[:3]]
    operands += [None] if mask is None else []
    results = []
    for _ in range(1 + twice):
        out, lse = b.attention(*operands, scale=0.3, **options)
        results += b.attention_grad(out, *operands[:3], out, lse, operands[3], scale=0.3, **options)
        operands[0] = out
    finish_function(function, results)
    return root


def ops(root: Op) -> list[Op]:
    return [op for op in root.walk() if op.name in ("step.attention", "step.attention_grad")]


class Stubs:
    """Kernels that compute the formula, some of them with a fault, and a clock that knows what each takes."""

    def __init__(self, seconds: dict[str, float], faults: dict[str, str] | None = None):
        self.seconds, self.faults, self.last, self.runs = seconds, faults or {}, "", 0

    def kernels(self, op: Op, device: torch.device) -> list[str]:
        return list(self.seconds)

    def way(self, name: str, op: Op) -> attentions.Way:
        forward, backward = way_by("math", op)
        fault = self.faults.get(name, "")

        def ahead(*tensors):
            self.last, self.runs = name, self.runs + 1
            if fault == "crashes":
                raise RuntimeError("no room in shared memory\nmore")
            out, lse = forward(*tensors)
            return (out * 1.3 if fault == "out" else out), (lse + 0.7 if fault == "logsumexp" else lse)

        def back(*tensors):
            dq, dk, dv = backward(*tensors)
            return dq, (dk.roll(1, -2) if fault == "dk" else dk), dv

        return ahead, back

    def time(self, call: Callable[[], object], device: torch.device) -> float:
        call()
        return self.seconds[self.last]

    def choose(self, store: Store | None = None, **options) -> Attentions:
        return Attentions(CPU, store, kernels=self.kernels, way=self.way, time=self.time, **options)


def test_the_fastest_that_is_right_runs_forward_and_backward():
    stubs = Stubs({"cudnn": 4e-3, "flash": 1e-3, "efficient": 2e-3, "math": 9e-4}, {"math": "crashes", "flash": "dk"})
    root = program(twice=True, causal=True)
    (decision,) = stubs.choose().decide(root)
    assert (decision.kernel, decision.count) == ("efficient", 2)
    assert {op.attributes["kernel"] for op in ops(root)} == {"efficient"}
    assert decision.why == (
        "2,000.0 us forward and backward; cudnn 4,000.0 us; "
        + f"flash is excluded ({decision.timed[1].why}); "
        + "math is excluded (it crashed: RuntimeError: no room in shared memory)"
    )
    assert decision.timed[1].why.startswith("wrong: result 3 ")
    assert str(decision).startswith("2 x q 3x4x6x8 f32, causal, scale 0.3, dropout 0: efficient, ")
    verify(root)
    assert print_module(parse(print_module(root), context())) == print_module(root)


def test_where_results_must_repeat_unordered_kernels_take_no_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    fast = {"cudnn": 1e-3, "flash": 3e-3, "efficient": 2e-3, "cudnn_repeated": 1e-3}
    assert Stubs(fast).choose().decide(program())[0].kernel == "flash"
    assert Stubs({"cudnn": 1e-3, "efficient": 2e-3}).choose().decide(program())[0].kernel == "math"
    assert Stubs(fast).choose(measure=False).decide(program())[0].kernel == "flash"


@pytest.mark.parametrize(("fault", "result"), [("out", 0), ("logsumexp", 1), ("dk", 3)])
def test_every_result_is_compared(fault, result):
    stubs = Stubs({"flash": 1e-3, "math": 2e-3}, {"flash": fault})
    (decision,) = stubs.choose().decide(program())
    assert decision.kernel == "math" and f"wrong: result {result} " in decision.timed[0].why


def test_pytorchs_own_choice_stays_where_little_is_won():
    root = program()
    (decision,) = Stubs({"flash": 1.00e-3, "math": 0.97e-3}).choose().decide(root)
    assert decision.kernel == "flash" and not any("kernel" in op.attributes for op in ops(root))
    (decision,) = Stubs({"flash": 1.00e-3, "math": 0.90e-3}).choose().decide(root)
    assert decision.kernel == "math" and {op.attributes["kernel"] for op in ops(root)} == {"math"}
    (decision,) = Stubs({"flash": 1.00e-3, "math": 0.97e-3}).choose().decide(root)  # a mark of before goes
    assert not any("kernel" in op.attributes for op in ops(root))


def test_the_formula_is_left_where_all_are_wrong():
    stubs = Stubs({"cudnn": 1e-3, "flash": 1e-3}, {"cudnn": "out", "flash": "crashes"})
    root = program()
    (decision,) = stubs.choose().decide(root)
    assert decision.kernel == "math" and decision.why.startswith("the formula, for nothing else is right; cudnn is exc")
    assert {kernel_of(op, CPU) for op in ops(root)} == {"math"}


def test_what_was_measured_is_kept(tmp_path: Path):
    stubs = Stubs({"flash": 2e-3, "math": 1e-3})
    first = stubs.choose(Store("one", tmp_path)).decide(program())
    runs = stubs.runs
    assert runs and stubs.choose(Store("one", tmp_path)).decide(program()) == first
    assert stubs.runs == runs
    others = [program(causal=True), program(element=BF16), program(transposed=True), program(mask=(6, 6))]
    others += [program(mask=(6, 6), mask_element=F32), program((3, 4, 5, 8))]
    for other in others:  # whatever tells cases apart
        stubs.choose(Store("one", tmp_path)).decide(other)
        assert stubs.runs > runs
        runs = stubs.runs
    stubs.choose(Store("another machine", tmp_path)).decide(program())
    assert stubs.runs > runs
    runs, fewer = stubs.runs, Stubs({"flash": 2e-3, "cudnn": 1e-3})  # the winner of before is no longer there
    assert fewer.choose(Store("one", tmp_path)).decide(program())[0].kernel == "cudnn"


def test_without_tuning_nothing_runs():
    stubs = Stubs({"flash": 2e-3, "math": 1e-3})
    (decision,) = stubs.choose(measure=False).decide(program())
    assert (decision.kernel, decision.why, stubs.runs) == (
        "flash",
        "PyTorch's own choice, not measured (tune=False)",
        0,
    )


def test_under_a_budget_the_formula_takes_no_part():
    stubs = Stubs({"flash": 2e-3, "math": 1e-3})
    (decision,) = stubs.choose(lean=True).decide(program())
    assert (decision.kernel, decision.why, stubs.runs) == ("flash", "the only one that can run it here", 0)


def test_one_that_is_too_large_to_compare(tmp_path: Path):
    stubs = Stubs({"flash": 2e-3, "math": 1e-3})

    def full(call, device):
        raise torch.OutOfMemoryError("full")

    choose = Attentions(CPU, Store("one", tmp_path), kernels=stubs.kernels, way=stubs.way, time=full)
    (decision,) = choose.decide(program())
    assert (decision.kernel, decision.why) == ("flash", "PyTorch's own choice: too large to compare on this device")
    assert not Store("one", tmp_path).rows()


CASES = [
    dict(),
    dict(causal=True, transposed=True),
    dict(element=BF16, causal=True),
    dict(mask=(3, 1, 6, 6)),
    dict(mask=(6, 6), mask_element=F32),
    dict(k=(3, 4, 9, 8)),
    dict(k=(3, 2, 6, 8), enable_gqa=True, causal=True, transposed=True),
    dict(k=(3, 1, 9, 8), enable_gqa=True, element=BF16, mask=(3, 4, 6, 9)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_of_a_cpu_give_the_formula(case):
    """The ops themselves, by the kernel that their attribute names, on operands as they are made up for timing."""
    root = program(**case)
    forward = ops(root)[0]
    names = ["flash", "flash_repeated", "math"] if "enable_gqa" in case else ["flash", "math"]
    assert kernels_for(forward, CPU) == names
    orders = [attentions.order_of(v) for v in (forward.q, forward.k, forward.v)]
    assert orders[0] == ((0, 2, 1, 3) if case.get("transposed") else (0, 1, 2, 3))
    q, k, v, dout, mask = made_up(forward, orders, CPU)
    assert q.permute(orders[0]).is_contiguous() and q.dtype is (torch.bfloat16 if "element" in case else torch.float32)
    wanted = formula(forward, q, k, v, dout, mask, True)
    for name in names:
        ahead, back = way_by(name, forward)
        out, lse = ahead(q, k, v, mask)
        found = [out, lse, *back(dout, q, k, v, out, lse, mask)]
        tolerance = dict(rtol=3e-2, atol=3e-2) if q.dtype is torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.to(theirs.dtype), theirs, **tolerance)


def test_corners_are_of_the_first_and_last_example_and_heads():
    root = program((5, 8, 6, 4), (5, 4, 6, 4), enable_gqa=True)
    op = ops(root)[0]
    q, k, v, dout, _ = made_up(op, [range(4)] * 3, CPU)
    whole = formula(op, q, k, v, dout, None, True)
    part = formula(op, *(corner(t, op) for t in (q, k, v, dout)), None, True)
    assert part[0].shape == (2, 4, 6, 4) and part[3].shape == (2, 2, 6, 4)
    for mine, theirs in zip(part, whole, strict=True):
        torch.testing.assert_close(mine, corner(theirs, op))


def test_a_chosen_kernel_is_what_runs(monkeypatch):
    """The executor runs what the attribute says, and a kernel of another device counts as absent."""
    root = program(causal=True)
    inputs = [torch.randn(SHAPE) for _ in range(3)]
    function = next(iter(root.regions[0].block))
    plain = Executable(function)(inputs)
    for op in ops(root):
        op.attributes["kernel"] = "math"
    for mine, theirs in zip(Executable(function)(inputs), plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    seen = []
    monkeypatch.setattr(attention_cuda, "gpu_of", lambda device: ((9, 0), 91900))
    for element, kernel in ((BF16, "efficient"), (F32, "flash")):
        (op, grad) = ops(program(element=element, causal=True))
        op.attributes["kernel"] = grad.attributes["kernel"] = kernel
        seen.append([kernel_of(o, torch.device("cuda")) for o in (op, grad)])
    assert seen == [["efficient"] * 2, ["efficient"] * 2]  # flash has no f32


def test_kernels_of_a_gpu_in_pytorchs_order():
    found = [attention_cuda.fused_kernels(ops(program(**case))[0], (9, 0), 91900) for case in (
        dict(element=BF16, causal=True), dict(element=F32), dict(element=BF16, mask=(6, 6)),
        dict(element=BF16, causal=True, k=(3, 2, 6, 8), enable_gqa=True))]  # fmt: skip
    assert found == [
        ["cudnn", "flash", "efficient"], ["efficient"], ["efficient"], ["cudnn", "flash", "efficient", "cudnn_repeated"]
    ]  # fmt: skip
