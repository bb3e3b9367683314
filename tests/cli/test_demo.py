"""`wholestep demo`: for real at a tiny size, and its bookkeeping with a stand-in for the compiler."""

from __future__ import annotations

import argparse
import io
import itertools
import math
import time
from types import SimpleNamespace

import pytest
import torch

import wholestep
from wholestep.cli import demo, main
from wholestep.cli.console import Console
from wholestep.cli.tiny_gpt import Shape, TinyGPT, batches, loss_fn, standard_library_text
from wholestep.errors import InputError

TINY = Shape(layers=1, width=16, heads=2, context=16, batch=2)


def _arguments(**changes):
    defaults = {"steps": 4, "seconds": 60.0, "seed": 0, "program": None, "text": None}
    return argparse.Namespace(**(defaults | changes))


def _stand_in(scale: float):
    """A compiler that trains eagerly and reports `scale` times the loss."""

    def compile(model, loss_fn, optimizer, example_batch, clip_norm):
        def step(*batch):
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            return loss.detach() * scale

        step.report = lambda: SimpleNamespace(ops={"forward": 11, "update": 22}, seconds={"capture": 0.25})
        step.program = lambda: "the program"
        return step

    return compile


def test_for_real(tmp_path, capsys):
    program = tmp_path / "step.mlir"
    assert demo.run(_arguments(program=str(program)), TINY) == 0
    text = capsys.readouterr().out
    for phase in ("forward", "loss", "backward", "clip", "update"):
        assert phase in text
    assert "4 steps each way" in text and program.exists()
    assert main.main(["opt", str(program), "--verify-only"]) == 0


def test_equal_runs_agree_exactly(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(wholestep, "compile", _stand_in(1.0), raising=False)
    program = tmp_path / "step.mlir"
    assert demo.run(_arguments(program=str(program)), TINY) == 0
    text = capsys.readouterr().out
    assert "largest relative difference over all 4 steps: 0.0e+00" in text and "33" in text
    assert program.read_text() == "the program\n"


@pytest.mark.parametrize("scale", [1.1, float("nan")])
def test_runs_that_part_are_reported_and_fail(monkeypatch, capsys, scale):
    monkeypatch.setattr(wholestep, "compile", _stand_in(scale), raising=False)
    assert demo.run(_arguments(), TINY) == 1
    assert "WARNING: the losses differ" in capsys.readouterr().out


def test_the_time_given_decides_the_steps():
    def step(x):
        time.sleep(0.02)
        return x

    console, data = Console(io.StringIO()), itertools.repeat((torch.zeros(()),))
    run = demo.train(console, "eager", step, data, steps=None, budget=0.2)
    assert 1 <= len(run.losses) <= 10 and sum(run.seconds[:-1]) <= 0.2
    assert len(demo.train(console, "eager", step, data, steps=None, budget=1e-9).losses) == 1
    assert len(demo.train(console, "eager", step, data, steps=3, budget=math.inf).losses) == 3


def test_the_time_in_all_is_about_what_was_given(monkeypatch, capsys):
    monkeypatch.setattr(wholestep, "compile", _stand_in(1.0), raising=False)
    assert demo.run(_arguments(steps=None, seconds=3.0), TINY) == 0
    assert "steps each way" in capsys.readouterr().out


def test_the_commands_to_try_next_can_be_typed(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["/anywhere/bin/wholestep", "demo"])
    assert demo.this_command() == "wholestep"
    monkeypatch.setattr("sys.argv", ["/checkout/wholestep/__main__.py", "demo"])
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    assert demo.this_command() == f"{tmp_path}/.venv/bin/python -m wholestep"
    monkeypatch.chdir(tmp_path)
    assert demo.this_command() == ".venv/bin/python -m wholestep"


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (3, [0, 1, 2]), (10, [0, 1, 4, 9]), (64, [0, 1, 4, 9, 19, 49, 63])]
)
def test_milestones(count, expected):
    assert demo.milestones(count) == expected


@pytest.mark.parametrize("option", [["--steps", "0"], ["--steps", "x"], ["--seconds", "-1"], ["--seconds", "nan"]])
def test_senseless_numbers_are_refused(option, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["demo", *option])
    assert stop.value.code == 2 and option[0] in capsys.readouterr().err


def test_a_text_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    assert main.main(["demo", "--text", str(tmp_path / "absent")]) == 1
    assert "absent: No such file" in capsys.readouterr().err
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    with pytest.raises(InputError, match="9 bytes; at least 18"):
        demo.run(_arguments(text=str(short)), TINY)
    with pytest.raises(InputError, match="--text FILE"):
        standard_library_text(tmp_path)


def test_the_same_seed_gives_the_same_batches():
    text, files = standard_library_text()
    assert len(text) > 100_000 and files > 1
    first, again, other = (next(batches(text, TINY, seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_the_model_looks_at_no_later_byte():
    torch.manual_seed(0)
    model = TinyGPT(TINY)
    tokens = torch.randint(256, (1, TINY.context))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :-1], after[:, :-1]) and not torch.allclose(before[:, -1], after[:, -1])
    assert model.head.weight is model.token.weight
    assert loss_fn(model, tokens, tokens).dim() == 0
