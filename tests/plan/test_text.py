"""Plans as text: the dialect's own verifier accepts them, they come back the same, damage is named."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import pytest

from tests.plan.networks import Case, convnet, gpt
from wholestep.dialects import reference
from wholestep.dialects.move import verify_plan
from wholestep.errors import SavedStepError
from wholestep.plan import Plan, describe_changes, load, module_to_plan, plan_function, plan_to_module, save


def plan_of(case: Case, **options: bool) -> Plan:
    return plan_function(case.program.function, "cpu", case.numbers, **options)[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(gpt(0.1, layers=1), "sgd")


@pytest.fixture(scope="module")
def plan(case: Case) -> Plan:
    return plan_of(case)


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    save(plan, tmp_path / "step.plan")
    return tmp_path / "step.plan"


def test_file_gives_the_same_plan(plan: Plan, file: Path) -> None:
    assert load(file) == plan


@pytest.mark.parametrize("options", [{"precision": "bf16", "ema": 0.9, "clip_norm": 1.0}, {"accumulate": 2}])
def test_module_gives_the_same_plan(options: dict[str, object]) -> None:
    made = plan_of(Case(convnet(), **options))
    root = plan_to_module(made)
    verify_plan(root)
    assert module_to_plan(root) == made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"move.launch"', '"move.lunch"'),
        ("plan.number = 3 ", "plan.number = 4 "),
        ("lower_bound", "upper_bound"),
        ("plan.host_writes = array<i64: 0", "plan.host_writes = array<i64: 7"),
        ("plan.host_writes = ", "plan.forgotten = "),
        ('lifetime = "param"', 'lifetime = "forever"'),
        ('"move.result"', '"move.launch"'),
    ],
)
def test_damage_is_named(file: Path, old: str, new: str) -> None:
    text = file.read_text().partition("\n")[2]  # without its checksum
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(SavedStepError, match=r"(?s)step\.plan holds no plan that can be run: .*plan the step again"):
        load(file)


def test_cut_file_is_named(file: Path) -> None:
    text = file.read_text()
    for share in (0, 0.3, 0.999):
        file.write_text(text[: int(share * len(text))])
        with pytest.raises(SavedStepError, match="plan the step again"):
            load(file)
    file.write_bytes(b"\xff\xfe\x00binary\x80")
    with pytest.raises(SavedStepError, match="no text"):
        load(file)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("program_order_bound = ", "program_order_bound = 1", "changed or damaged"),
        ("plan 1, sha", "plan 2, sha", "it is version 2 of the format"),
        (", sha256 ", ", sha25 ", "its first line tells no checksum"),
    ],
)
def test_what_still_verifies_is_damage_too(file: Path, old: str, new: str, why: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(SavedStepError, match=why):
        load(file)


def test_overlap_in_a_file_is_found(plan: Plan, file: Path) -> None:
    """Two buffers at one address are refused as the file is read."""
    number, one = max(plan.owners(), key=lambda found: found[1].last - found[1].first)
    other_number, other = next(
        (n, b) for n, b in plan.owners() if n != number and one.first < b.first < one.last and b.bytes and one.bytes
    )
    lines = file.read_text().splitlines()[1:]  # without its checksum
    at = next(i for i, line in enumerate(lines) if f"plan.number = {other_number} " in line)
    assert f"offset = {other.offset} " in lines[at]
    lines[at] = lines[at].replace(f"offset = {other.offset} ", f"offset = {one.offset} ")
    file.write_text("\n".join(lines))
    with pytest.raises(SavedStepError, match=r"overlap|live"):
        load(file)


def test_differences_in_words(case: Case, plan: Plan) -> None:
    assert describe_changes(plan, plan) == ""
    told = describe_changes(plan_of(case, reorder=False), plan)
    assert "order: program -> " in told and "launches stand elsewhere" in told and "arena: " in told
    assert "different programs" in describe_changes(plan, plan_of(Case(convnet(), "sgd")))


def test_every_difference_is_told(plan: Plan) -> None:
    """Whatever makes two plans of one program unequal is in the words."""
    launch = next(i for i, x in enumerate(plan.launches) if x.op >= 0 and x.reads)
    own = next(i for i, b in enumerate(plan.buffers) if b.space == "arena")
    changes = [
        *[("launches", launch, n, v) for n, v in (("provider", "cpp"), ("stream", 1), ("phase", "x"), ("layer", "x"))],
        *[("launches", launch, n, ()) for n in ("reads", "writes")],
        *[("launches", launch, n, 77) for n in ("workspace", "makes", "takes", "waits")],
        *[("buffers", own, n, 7) for n in ("offset", "strides", "lifetime", "op", "name", "argument")],
    ]
    for kind, number, name, value in changes:
        other = copy.deepcopy(plan)
        setattr(getattr(other, kind)[number], name, value)
        assert name in describe_changes(plan, other), name
    for name in ("results", "assumed", "program_order_bound", "handed_beyond"):
        other = copy.deepcopy(plan)
        setattr(other, name, None)
        assert describe_changes(plan, other) == f"other {name.replace('_', ' ')}"


def test_mlir_opt_accepts_plans(plan: Plan, mlir_opt: str, tmp_path: Path) -> None:
    """Stock MLIR reads a plan, and what it prints back is the same plan."""
    irdl = tmp_path / "all.irdl.mlir"
    irdl.write_text("".join(page for name, page in reference.pages().items() if name.endswith(".irdl.mlir")))
    save(plan, tmp_path / "plan.mlir")
    command = [mlir_opt, f"--irdl-file={irdl}", "--mlir-print-op-generic", "--mlir-print-debuginfo"]
    done = subprocess.run([*command, str(tmp_path / "plan.mlir")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[:2000]
    (tmp_path / "again.mlir").write_text(done.stdout)
    assert load(tmp_path / "again.mlir") == plan
