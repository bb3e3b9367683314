"""Pipelines: reading them, options, passes from anyone, clear errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ir.toy import simple
from wholestep import ir
from wholestep.errors import IRError
from wholestep.ir.passes import available, register_pass, registry, run_pipeline

seen: list[tuple[int, float, bool, str]] = []


@pytest.fixture
def user_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    seen.clear()

    @register_pass("user-pass")
    def user_pass(module: ir.Op, *, count: int = 1, scale: float = 1.0, loud: bool = False, label: str = "") -> None:
        """What a user wrote."""
        seen.append((count, scale, loud, label))

    yield


def test_ours_are_there() -> None:
    assert set(available()) >= {"cse", "dce"}
    assert available()["cse"].startswith("Merges pure ops")


def test_a_users_pass_with_options(user_pass: None) -> None:
    root, _ = simple()
    runs = run_pipeline(root, " user-pass, user-pass{count=3 scale=2 loud label=a} ,dce{},user-pass{count=-1,loud=0}")
    assert [run.name for run in runs] == ["user-pass", "user-pass", "dce", "user-pass"]
    assert seen == [(1, 1.0, False, ""), (3, 2.0, True, "a"), (-1, 1.0, False, "")]
    assert all(run.seconds >= 0 for run in runs)
    assert available()["user-pass"] == "What a user wrote."


def test_an_empty_pipeline_does_nothing() -> None:
    assert run_pipeline(simple()[0], "  ") == []


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("csee", "there is no pass 'csee'; did you mean 'cse'? known passes: cse, dce"),
        ("cse,,dce", "cannot read the pipeline 'cse,,dce' at ',dce'"),
        ("cse,", "cannot read the pipeline 'cse,' at ''"),
        ("cse{", "cannot read the pipeline"),
        ("cse{depth=1}", "the pass 'cse' has no option 'depth'; its options: none"),
        ("user-pass{count=many}", "option 'count' of the pass 'user-pass' is a int, and 'many' is none"),
        ("user-pass{loud=maybe}", "option 'loud' of the pass 'user-pass' is a bool"),
    ],
)
def test_bad_pipelines(pipeline: str, message: str, user_pass: None) -> None:
    root, _ = simple()
    before = ir.print_module(root)
    with pytest.raises(IRError) as caught:
        run_pipeline(root, pipeline)
    assert message in str(caught.value)
    assert ir.print_module(root) == before


def test_a_name_is_taken_once(user_pass: None) -> None:
    with pytest.raises(ValueError, match="registered already"):
        register_pass("cse")(lambda module: None)
    with pytest.raises(ValueError, match="not a name a pipeline can spell"):
        register_pass("a,b")(lambda module: None)
