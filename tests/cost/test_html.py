"""The HTML report: one well-formed file, nothing from outside, nothing of the user's unescaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.cost.models import language_step, moved
from wholestep.cost.html import buckets, page
from wholestep.errors import InputError
from wholestep.machine.description import load_description
from wholestep.runtime.report import report_of

HOSTILE = '<script>alert("1")&\'</script>'
VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Every tag is closed in order; collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_one_file_with_every_chart():
    movement = moved(language_step())
    movement.price(replace(load_description("h200"), cache_bytes=10_000))
    text = page(movement, "a model", 0.01, "the table")
    found = parsed(text)
    labels = {v for k, v in found.attributes if k == "aria-label"}
    assert labels == {"bytes by cause", "memory in use over the step", "timeline of the step"}
    assert found.tags.count("script") == found.tags.count("style") == 1
    shown = " ".join(found.text)
    for heading in ("Bytes by cause", "Heaviest edges", "Heaviest kernels", "Bytes by phase", "Bytes by layer group"):
        assert heading in shown
    assert f"{movement.ratio:.2f}" in shown and "NVIDIA H200" in shown and "the table" in shown
    assert "through a cache of " in shown
    assert "models.py" in shown  # the user's source line


def test_nothing_comes_from_outside():
    text = page(moved(language_step()), "a model")
    found = parsed(text)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(found.tags)
    assert not [k for k, _ in found.attributes if k in ("src", "href", "xlink:href") or k.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)


def test_a_hostile_layer_name_stays_text():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(HOSTILE, nn.Linear(4, 4))

        def forward(self, x):
            return getattr(self, HOSTILE)(x)

    model = Model()
    step = ws.compile(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(2, 4),))
    movement = moved(step)
    assert any(HOSTILE in layer for layer in movement.ledger.by_layer())
    text = page(movement, HOSTILE, 0.1, str(movement))
    found = parsed(text)
    assert found.tags.count("script") == 1 and HOSTILE not in text
    assert HOSTILE in "".join(found.text)
    assert any(value is not None and HOSTILE in value for key, value in found.attributes if key == "data-tip")


def test_bars_of_the_causes_are_as_long_as_their_bytes():
    movement = moved(language_step())
    chart = re.search(r'<svg[^>]*aria-label="bytes by cause">(.*?)</svg>', page(movement, "m"), re.S)
    assert chart is not None
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', chart[1])]
    sizes = [size for pair in movement.ledger.by_cause().values() for size in pair]
    assert len(widths) == len(sizes)
    whole = sum(sizes) / sum(widths)
    for width, size in zip(widths, sizes, strict=True):
        assert abs(width * whole - size) < whole  # to a pixel


def test_report_in_each_format():
    step = language_step()
    report = report_of(step)
    assert report.rendered("text") == str(report)
    plain = json.loads(report.rendered("json"))
    assert plain["bytes"] == plain["movement"]["moved"]["total"] == report.bytes
    causes = plain["movement"]["by cause"]
    assert (
        sum(c["read"] + c["written"] for c in causes.values()) == report.bytes and causes["communication"]["read"] == 0
    )
    parsed(report.rendered("html"))
    with pytest.raises(InputError, match='"text", "json" or "html"'):
        report.rendered("pdf")


def test_buckets_cover_everything_once():
    for length, most in ((1, 10), (10, 3), (1000, 900)):
        found = buckets(length, most)
        assert [i for a, b in found for i in range(a, b)] == list(range(length)) and len(found) <= most
