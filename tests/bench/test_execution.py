"""The benchmark of execution measures what it says; the figures themselves are not a test's business."""

from __future__ import annotations

import torch

from bench import execution


def test_the_plan_has_one_call_per_launch_and_the_plain_loop_does_the_same_work() -> None:
    torch.manual_seed(0)
    bound = execution.tiny_launches(12)
    assert len(bound.plan.launches) == 12 and all(not launch.makes for launch in bound.plan.launches)
    bound.run()
    want = bound.results()[0].clone()
    bound.arena.fill_(0)
    execution.plain_loop(execution.by_bindings(bound))
    assert torch.equal(bound.results()[0], want) and want.abs().sum() > 0


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    found = execution.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b"] * 3
    assert [len(seconds) for seconds in found.values()] == [2, 2]


def test_a_whole_step_is_compared_three_ways() -> None:
    found = execution.whole_steps("tiny", small=True)
    assert set(found["milliseconds"]) == {"plan", "loop", "reference", "eager"}
    assert found["launches"] > 50 and found["loss_apart_from_eager"] < 1e-5


def test_the_page_says_whether_the_bar_holds() -> None:
    tiny = execution.launches(12, rounds=2)
    record = {"machine": "m", "torch": "t", "python": "p", "command": "c", "load": 0.0, "steps": {}}
    assert "microseconds holds" in execution.report({**record, "launches": tiny | {"overhead": 4.9}})
    assert "microseconds does NOT hold" in execution.report({**record, "launches": tiny | {"overhead": 5.1}})
