"""What runs in a contender's process, here without one; and the command with two real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import networks
from tests.bench import strange_networks
from wholestep.bench import agreement, jax_contender, runner, worker, workload
from wholestep.bench.clock import Clock
from wholestep.bench.field import Field
from wholestep.bench.race import Reference, verdict
from wholestep.bench.record import refused_lines
from wholestep.bench.worker import REFUSED, nudge, refused_by_the_clock, serve
from wholestep.cli.main import main
from wholestep.errors import InputError
from wholestep.torch_private import hold_while_timing
from wholestep.transforms.opportunity import Change, Opportunity

NETWORKS = "tests.bench.strange_networks"


@pytest.fixture(autouse=True)
def aten_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_PROVIDERS", "aten")  # nothing is built


def told(
    contender: str, network: str, *orders: dict[str, Any], precision: str = "fp32", **more: Any
) -> list[dict[str, Any]]:
    begin = {"do": "begin", "contender": contender, "case": [network, "tiny"], "precision": precision}
    begin |= {"device": "cpu", "threads": 0, "networks": NETWORKS, "bind": {}} | more
    answers: list[dict[str, Any]] = []
    serve(io.StringIO("\n".join(map(json.dumps, [begin, *orders, {"do": "end"}]))), answers.append)
    return answers


def serving(contender: str, network: str, *orders: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    ready, *answers = told(contender, network, *orders, **more)
    assert ready == {"ready": True}
    return answers


PREPARE = {"do": "prepare", "steps": 3}


def test_ours_and_eager_train_alike_and_answer_all_orders() -> None:
    orders = [PREPARE, {"do": "time", "seconds": 0.001}, {"do": "memory"}, {"do": "facts"}, {"do": "profile"}]
    theirs, rounded, *_ = serving("eager", "plain", PREPARE, {"do": "rounded", "steps": 3})
    ours, timed, memory, facts, profile = serving("wholestep", "plain", *orders)
    assert verdict(ours["losses"], Reference(theirs["losses"], 1e-6))["status"] == "agrees"
    assert len(set(theirs["losses"])) == 3 and facts["moved / bound"] >= 1
    assert facts["refused"] == []  # (on a CPU the clock has no say in what is one kernel)
    curves = rounded["rounded"]
    assert list(curves) == (["nudged", "one thread"] if torch.get_num_threads() > 1 else ["nudged"])
    assert all(curve == pytest.approx(theirs["losses"], rel=1e-6) for curve in curves.values())
    assert timed["seconds"] > 0 and timed["steps"] >= 3
    parameters = 8 * 8 + 8 + 8 * 3 + 3
    assert ours["parameters"] == parameters and memory["state_bytes"] >= 3 * 4 * parameters
    assert memory["peak_bytes"] > memory["state_bytes"]
    assert profile["families"]["gemm"]["bytes"] > 0 and profile["families"]["optimizer"]["us"] > 0


def test_budgets_and_checkpoints_train_as_eager_does() -> None:
    (theirs,) = serving("eager", "blocks", PREPARE)
    for contender in ("wholestep:1", "checkpoint"):
        ours, load, facts = serving(contender, "blocks", PREPARE, {"do": "device_load"}, {"do": "facts"})
        assert verdict(ours["losses"], Reference(theirs["losses"], 1e-6))["status"] == "agrees"
        assert load == {}  # there is no device beside the host
        assert (facts == {}) == (contender == "checkpoint")
    assert "no list of equal blocks" in serving("checkpoint", "plain", PREPARE)[0]["error"]


def test_a_network_that_changes_when_compiled_disagrees() -> None:
    (theirs,), (ours,) = serving("eager", "moody", PREPARE), serving("wholestep", "moody", PREPARE)
    found = verdict(ours["losses"], Reference(theirs["losses"], 1e-3))
    assert found["status"] == "disagrees" and found["distance"] == pytest.approx(0.1, rel=0.1)


def test_a_gradient_of_another_sign_disagrees() -> None:
    prepare = {"do": "prepare", "steps": 12}
    theirs, rounded = serving("eager", "crooked", prepare, {"do": "rounded", "steps": 12})
    (ours,) = serving("wholestep", "crooked", prepare)
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-6)  # forward is the same
    limits = agreement.limits("fp32", theirs["losses"], rounded["rounded"])
    assert verdict(ours["losses"], Reference(theirs["losses"], 0.0, limits=limits))["status"] == "disagrees"


def test_a_nudge_moves_weights_by_their_last_bit() -> None:
    model = torch.nn.Linear(30, 30)
    before = model.weight.detach().clone()
    nudge(model)
    assert (model.weight != before).float().mean() > 0.9
    torch.testing.assert_close(model.weight.detach(), before, rtol=2.0**-22, atol=0.0)


def test_a_failure_is_an_answer() -> None:
    (broken,) = serving("wholestep", "broken", PREPARE)
    assert "this network will not be compiled" in broken["error"] and not broken["out_of_memory"]
    absent = told("eager", "nobody")
    assert "there is no network 'nobody'" in absent[0]["error"]


def test_jax_trains_as_eager_does_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setattr(strange_networks, "jax_twin", twin_of_plain, raising=False)
    (theirs,) = serving("eager", "plain", PREPARE)
    steps: list[Any] = []
    make = jax_contender.JaxTraining.__init__

    def noted(self: Any, *given: Any) -> None:
        make(self, *given)
        steps.append(self.step)

    monkeypatch.setattr(jax_contender.JaxTraining, "__init__", noted)
    ours, timed, memory = serving("jax", "plain", PREPARE, {"do": "time", "seconds": 0.001}, {"do": "memory"})
    assert steps[0]._cache_size() == 1  # a later step would compile it again if it found arrays of another kind
    assert verdict(ours["losses"], Reference(theirs["losses"], 1e-5))["status"] == "agrees"
    assert timed["seconds"] > 0 and memory["state_bytes"] == 3 * 4 * (8 * 8 + 8 + 8 * 3 + 3) + 4


def twin_of_plain(name: str, model: Any, precision: str) -> Any:
    import jax

    def loss(p: Any, state: Any, x: Any, y: Any) -> Any:
        logits = jax.nn.relu(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean(), state

    return {name: jax.numpy.array(p.detach().numpy()) for name, p in model.named_parameters()}, {}, loss


def test_without_jax_or_a_twin_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_contender, "util", SimpleNamespace(find_spec=lambda name: None))
    (absent,) = serving("jax", "plain", PREPARE)
    assert "JAX is not installed here" in absent["error"]
    assert not jax_contender.has_twin("gpt2", workload.NETWORKS)
    monkeypatch.setattr(jax_contender, "util", SimpleNamespace(find_spec=lambda name: name))
    with_twins = [name for name in networks.TWELVE if jax_contender.has_twin(name, workload.NETWORKS)]
    assert with_twins == ["gpt2", "resnet50"]  # which race against it unless --against says otherwise


def test_networks_of_images_are_channels_last_for_everybody() -> None:
    made = workload.build(workload.Case("images", "tiny"), "cpu", NETWORKS)
    assert made.model[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert made.batch(0, "cpu")[0].is_contiguous(memory_format=torch.channels_last)
    (theirs,), (ours,) = serving("eager", "images", PREPARE), serving("aten", "images", PREPARE)
    assert verdict(ours["losses"], Reference(theirs["losses"], 1e-5))["status"] == "agrees"


def test_an_eager_profile_has_families_with_bytes() -> None:
    _, profile = serving("eager", "plain", PREPARE, {"do": "profile"})
    gemm = profile["families"]["gemm"]
    # forward: x (4x8), the weight, the bias and the result, and so on: more than the first weight, less than a megabyte
    assert 8 * 8 * 4 < gemm["bytes"] < 1e6 and gemm["calls"] >= 2
    assert profile["us"] == pytest.approx(sum(part["us"] for part in profile["families"].values()))


def test_cases_of_a_command_line(tmp_path: Path) -> None:
    assert workload.cases(["resnet50@few", "gpt2"], "full,few") == [
        workload.Case("resnet50", "few"),
        workload.Case("gpt2", "full"),
        workload.Case("gpt2", "few"),
    ]
    assert len(workload.cases([], "full")) == 12 and len(workload.cases([], "cpu")) == 12
    with pytest.raises(InputError, match=r"gone\.onnx is not there"):
        workload.cases(["gone.onnx"], "full")
    with pytest.raises(InputError, match="--networks names the module no_such_module"):
        workload.networks("no_such_module")


def test_the_command_measures_keeps_and_summarises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    quick = ["--networks", NETWORKS, "--rounds", "1", "--block", "0.001", "--steps", "2", "--device", "cpu"]
    common = [*quick, "--threads", "1", "--json", str(file), "--against"]
    assert main(["bench", "plain@tiny", *common, "eager", "--together"]) == 0
    first = {e["contender"]: e for e in json.loads(file.read_text())["entries"]}
    assert set(first) == {"wholestep", "eager"} and all(e["status"] == "agrees" for e in first.values())
    assert first["wholestep"]["race"] == first["eager"]["race"] and first["eager"]["versions"]["torch"]
    assert "plain@tiny" in capsys.readouterr().out
    assert main(["bench", "--summary", str(file), "--html", str(tmp_path / "page.html"), "--networks", NETWORKS]) == 0
    assert "plain@tiny" in (tmp_path / "page.html").read_text()
    assert main(["bench", "--summary", str(tmp_path / "none.json")]) == 1
    assert main(["bench", "plain", "--against", "compiled"]) == 1
    assert "did you mean 'compile'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--together", "plain"])
    assert "plain is no number of cases; name networks before it" in capsys.readouterr().err


def test_only_those_without_times_beside_ours_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, raced = tmp_path / "bench.json", {}

    def run(field: Field, work: Any, done: Any) -> None:
        raced.update({str(race.case): race.wanted for race in field.races})

    quick = ["--networks", NETWORKS, "--rounds", "1", "--block", "0.001", "--steps", "2", "--device", "cpu"]
    common = [*quick, "--threads", "1", "--json", str(file)]
    assert main(["bench", "plain@tiny", *common, "--against", "eager"]) == 0
    monkeypatch.setattr(Field, "run", run)
    main(["bench", "plain@tiny", "blocks@tiny", *common, "--against", "eager,compile", "--missing"])
    assert raced == {"plain@tiny": ["wholestep", "compile"], "blocks@tiny": ["eager", "wholestep", "compile"]}
    main(["bench", "plain@tiny", *common, "--against", "eager", "--missing"])
    assert "plain@tiny: nobody is missing" in capsys.readouterr().out


def test_the_optimizer_is_there_before_compile_time_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    make = worker.make

    def noted(contender: str, workload: Any, *given: Any) -> Any:
        there.append("optimizer" in vars(workload))
        return make(contender, workload, *given)

    monkeypatch.setattr(worker, "make", noted)
    serving("eager", "plain", PREPARE)
    serving("wholestep", "plain", PREPARE)
    serving("jax", "plain", PREPARE)  # (which has no twin of it, or is not installed)
    assert there == [True, True, False]


@pytest.mark.parametrize("clock", ["with others", ""])
def test_who_shares_a_clock_trains_while_it_has_it(clock: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: list[bool] = []
    hooks: list[Any] = []
    train = worker.Worker.train

    def noted(self: Any, *given: Any) -> Any:
        with Clock(tmp_path / "clock").held(time.monotonic()) as free:
            held.append(not free)
        return train(self, *given)

    monkeypatch.setattr(worker.Worker, "train", noted)
    monkeypatch.setattr(worker, "hold_while_timing", hooks.append)
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    begin = {"clock": str(tmp_path / "clock") if clock else None}
    (found,) = serving("compile-max-autotune", "plain", PREPARE, **begin)
    assert held == [bool(clock)] and len(hooks) == bool(clock) and len(found["losses"]) == 3


def test_torch_compile_times_kernels_while_it_has_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    told: list[str] = []

    @contextlib.contextmanager
    def held() -> Any:
        told.append("begin")
        yield
        told.append("end")

    monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda call, **named: call(), raising=False)
    hold_while_timing(held)
    benchmarker.benchmark(lambda: told.append("kernel"), device="cuda")
    assert told == ["kernel", "begin", "kernel", "end"]  # the first call may have to load it


def test_what_was_slower_as_one_kernel_is_told_by_kind() -> None:
    def found(layer: int, bytes: int, why: str) -> Opportunity:
        return Opportunity(
            "fuse", f"step/layers.{layer}.norm/sum#0 <- step/layers.{layer}/contract#1", Change(-bytes), why
        )

    slower = "measured: 12.0 us as one kernel, 10.0 us apart"
    told = refused_by_the_clock([found(1, 30, slower), found(2, 50, slower), found(3, 10**9, "it is forbidden")])
    site = "step/layers.*.norm/sum#* <- step/layers.*/contract#*"
    assert told == [{"site": site, "count": 2, "bytes": 80, "why": slower}]
    many = [replace(found(0, 1, slower), site=f"step/{chr(97 + i)}") for i in range(20)]
    assert len(refused_by_the_clock(many)) == REFUSED
    assert refused_lines(told)[-1] == f"| {site} | 2 | 0.00 | 12.0 us as one kernel, 10.0 us apart |"
    assert refused_lines([]) == []


#: a process that has sent its errors elsewhere and has compiled a kernel, beside more threads than a list has room for
ELSEWHERE = """
import os, threading, time
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from wholestep.bench.worker import tell_when_asked

@triton.jit
def twice(x):
    tl.store(x, 2 * tl.load(x))

tell_when_asked()
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
for _ in range(120):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
triton.compile(ASTSource(fn=twice, signature={"x": "*fp32"}, constexprs={}), target=GPUTarget("cuda", 90, 32))

def compiling():
    print("compiles", flush=True)
    time.sleep(60)

compiling()
"""


def test_a_process_says_where_it_is_wherever_its_errors_go(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    log, script = tmp_path / "log", tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    root = str(Path(__file__).parents[2])
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0", "PYTHONPATH": root}
    with log.open("w") as file, subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=file, env=environ
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"compiles\n"
        os.kill(process.pid, runner.ASKED)
        end = time.monotonic() + 10
        while "in <module>" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        process.kill()
    assert runner.told(log.read_text()).startswith("in compiling (elsewhere.py:")
    assert runner.told("") == "and does not say where"
