"""Orders and addresses are kept: the second time nothing is searched, and what is no right entry is made again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plan.networks import Case, gpt
from tests.plan.test_joins import case_of
from tests.plan.test_order import graph_of
from wholestep.plan import joined, planner, remembered
from wholestep.plan.plan import Plan
from wholestep.plan.planner import plan_function
from wholestep.plan.remembered import Memory, lie_apart


class Kept(dict[str, bytes]):
    """What a store keeps."""

    def read(self, kind: str, digest: str) -> bytes | None:
        return self.get(digest)

    def write(self, kind: str, digest: str, data: bytes) -> None:
        self[digest] = data


def never(*args: Any) -> Any:
    raise AssertionError("it was searched again")


def test_the_second_time_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    case, kept = case_of("packed"), Kept()

    def planned() -> Plan:
        return plan_function(case.program.function, "cpu", case.numbers)[0]

    plain = planned()
    monkeypatch.setattr(planner._Planner, "memory", property(lambda self: Memory(kept)))
    assert planned() == plain and len(kept) >= 3  # an order, addresses, and that the peak does not grow
    for module, name in ((remembered, "best_order"), (remembered, "place"), (joined, "quick")):
        monkeypatch.setattr(module, name, never)
    assert planned() == plain
    monkeypatch.setattr(remembered, "source_hash", lambda: "of other code")
    with pytest.raises(AssertionError, match="searched again"):
        planned()


@pytest.mark.parametrize("damage", [b"\xff", b"[]", b"{}", b'{"name": "x", "order": 1, "placer": "x", "offsets": 1}'])
def test_an_entry_that_is_none_is_made_again(damage: bytes) -> None:
    graph, phases = graph_of(Case(gpt(layers=1)))
    kept = Kept()
    memory = Memory(kept)
    order = memory.order(graph, phases)
    placement = memory.placement(order[2], 64, False)
    entries = dict(kept)
    for digest in entries:
        kept[digest] = damage
    assert memory.order(graph, phases) == order and memory.placement(order[2], 64, False) == placement
    assert kept == entries


def test_an_entry_that_is_wrong_is_made_again() -> None:
    """Launches before what they need, addresses that two have at once."""
    graph, phases = graph_of(Case(gpt(layers=1)))
    kept = Kept()
    memory = Memory(kept)
    order = memory.order(graph, phases)
    placement = memory.placement(order[2], 64, False)
    entries = dict(kept)
    for digest, text in entries.items():
        entry = json.loads(text)
        if "order" in entry:
            entry["order"].reverse()
        else:
            entry["offsets"] = [0 for _ in entry["offsets"]]
        kept[digest] = json.dumps(entry).encode()
    assert memory.order(graph, phases) == order and memory.placement(order[2], 64, False) == placement
    assert kept == entries


@pytest.mark.parametrize(
    "offsets, right",
    [([0, 64, 0], True), ([0, 0, 64], False), ([0, 32, 0], False), ([64, -64, 0], False), ([0, 64], False)],
)
def test_which_addresses_are_right(offsets: list[int], right: bool) -> None:
    assert lie_apart([0, 1, 2], [2, 3, 3], [64, 64, 64], offsets, 64) is right
