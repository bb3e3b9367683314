"""Attributes: their text and the stand-ins that tell equal from alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from tests.ir.toy import attributes
from wholestep import ir


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1 : i64"),
        (1.0, "1.0 : f64"),
        (1e-30, "1.0e-30 : f64"),
        (float("-inf"), "0xFFF0000000000000 : f64"),
        (None, "unit"),
        ('a"\\\né', '"a\\"\\\\\\0A\\C3\\A9"'),
        ((), "array<i64>"),
        ((1, -2), "array<i64: 1, -2>"),
        ([1, []], "[1 : i64, []]"),
        ({"a": None, "b c": True}, '{a, "b c" = true}'),
        (ir.Symbol("a b"), '@"a b"'),
        (ir.I32Array(()), "array<i32>"),
        (ir.DialectAttribute("move.space", ("hbm", 0)), '#move.space<"hbm", 0 : i64>'),
    ],
)
def test_text(value: object, text: str) -> None:
    assert ir.attribute_text(value) == text


def test_what_is_no_attribute() -> None:
    with pytest.raises(TypeError, match="is not an attribute"):
        ir.attribute_text({1, 2})


def test_stand_ins_tell_kinds_apart() -> None:
    alike = [1, 1.0, True, "1", (1,), [1], [True], [1.0], 0.0, -0.0, False, {"a": 1}, {"a": True}]
    alike += [ir.DialectAttribute("a.b", (1,)), ir.DialectAttribute("a.b", (True,))]
    for left, right in itertools.combinations(alike, 2):
        assert ir.freeze(left) != ir.freeze(right)


@given(attributes)
@settings(max_examples=50, deadline=None)
def test_stand_ins_hash(value: object) -> None:
    assert hash(ir.freeze(value)) == hash(ir.freeze(value))
