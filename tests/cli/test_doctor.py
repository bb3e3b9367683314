"""`wholestep doctor`: what it shows, what it calls missing, and its exit code."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace

import pytest
import torch

from wholestep.cli import doctor, main
from wholestep.cli.console import Console
from wholestep.machine import calibrate as calibration
from wholestep.machine.cpu import Amx
from wholestep.machine.describe import Cuda, Machine
from wholestep.machine.description import Description, load_description

COMPLETE = Machine(
    system="Linux 6 x86_64",
    cpu="A CPU",
    cores=2,
    memory_bytes=24 * 2**30,
    isa=("avx2",),
    amx=Amx(announced=False),
    python="3.11.7",
    torch="2.13.0+cpu",
    cuda=(Cuda("A GPU", 80 * 2**30, "9.0"),),
    compilers={"g++": "g++ 12", "clang++": None},
    mlir_opt="LLVM version 22",
    packages={name: "1.0" for name in ("rich", "triton", "xdsl", "transformers", "hypothesis")},
)


def _shown(machine: Machine) -> str:
    stream = io.StringIO()
    doctor.show(machine, Console(stream, use_rich=False))
    return stream.getvalue()


def test_a_complete_machine_misses_nothing():
    assert doctor.missing(COMPLETE) == []
    text = _shown(COMPLETE)
    assert "Missing\nnothing" in text
    for fact in ("A CPU, 2 usable cores", "24.0 GiB", "A GPU, 80.0 GiB, compute capability 9.0", "2.13.0+cpu"):
        assert fact in text


@pytest.mark.parametrize(
    ("change", "what", "loss"),
    [
        ({"torch": None, "torch_problem": "torch is not installed"}, "torch", "not installed"),
        ({"torch": "2.10.1"}, "torch 2.11 to 2.13", "torch 2.10.1"),
        ({"torch": "3.0a0+git1"}, "torch 2.11 to 2.13", "torch 3.0a0+git1"),
        ({"cuda": ()}, "CUDA device", "GPU"),
        ({"compilers": {"g++": None, "clang++": None}}, "C++ compiler", "CPU kernels"),
        ({"mlir_opt": None}, "mlir-opt", "mlir-22-tools"),
        ({"packages": COMPLETE.packages | {"rich": None}}, "rich", "progress bars"),
        ({"packages": COMPLETE.packages | {"triton": None}}, "triton", "GPU kernels"),
        ({"packages": COMPLETE.packages | {"xdsl": None, "hypothesis": None}}, "xdsl, hypothesis", "make test"),
    ],
)
def test_each_absence_names_its_loss(change, what, loss):
    machine = replace(COMPLETE, **change)
    ((named, lost),) = doctor.missing(machine)
    assert named == what and loss in lost
    assert lost in _shown(machine)


def test_a_cpu_that_only_has_the_name_of_a_described_one_is_told_so(monkeypatch):
    monkeypatch.delenv("WHOLESTEP_MACHINE", raising=False)
    found = replace(COMPLETE, cpu="AMD EPYC", cuda=(), isa=("avx2", "fma", "avx512f"))
    ((_, gpu), (what, loss)) = doctor.missing(found)
    assert "GPU" in gpu and what == "description of this CPU"
    assert "epyc-2-cores: it has avx512_bf16, and this one has not" in loss
    assert loss.endswith("Try: wholestep doctor --calibrate --write FILE") and loss in _shown(found)
    for described in (("avx2", "fma"), ("avx2", "fma", "avx512f", "avx512_bf16")):
        assert len(doctor.missing(replace(found, isa=described))) == 1
    assert doctor.missing(replace(found, cuda=COMPLETE.cuda)) == []  # it is the GPU that is measured


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.0a0+git1", "2.13.0"])
def test_supported_torch_is_not_missed(version):
    assert doctor.missing(replace(COMPLETE, torch=version)) == []


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (COMPLETE, 0),
        (replace(COMPLETE, torch=None, torch_problem="gone"), 1),
        (replace(COMPLETE, amx=Amx(True, False, "AVX512_CORE_BF16", True, errno.EPERM)), 0),
        (replace(COMPLETE, amx=Amx(True, False, "ALL", False, errno.EPERM)), 1),
    ],
)
def test_exit_code_and_amx_verdict(machine, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "describe", lambda: machine)
    assert main.main(["doctor"]) == code
    assert machine.amx.verdict[:30] in capsys.readouterr().out


def test_json_of_this_machine(capsys):
    main.main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    assert facts["amx"]["verdict"] and isinstance(facts["amx"]["safe"], bool)
    assert all(set(entry) == {"what", "loss"} for entry in facts["missing"])


MEASURED = Description(
    "A CPU", "cpu", 2e10, {"f32": 1e11, "bf16": 2e11}, 2.5e-6, cores=2, sources={"bandwidth": "measured"}
)


def test_calibration_is_shown_and_written(monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(doctor, "describe", lambda: replace(COMPLETE, cuda=()))
    monkeypatch.setattr(calibration, "calibrate", lambda device: asked.append(device) or MEASURED)
    file = tmp_path / "mine.json"
    assert main.main(["doctor", "--calibrate", "--write", str(file)]) == 0
    out = capsys.readouterr().out
    for figure in ("20.0 GB/s", "100.0 Gflop/s", "200.0 Gflop/s", "2.50 us", "WHOLESTEP_MACHINE="):
        assert figure in out
    assert load_description(file) == MEASURED and asked == ["cpu"]
    assert main.main(["doctor", "--calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bandwidth"] == 2e10


def test_a_cuda_device_is_measured_where_there_is_one(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(doctor, "describe", lambda: COMPLETE)
    monkeypatch.setattr(calibration, "calibrate", lambda device: asked.append(device) or MEASURED)
    assert main.main(["doctor", "--calibrate"]) == 0
    assert asked == ["cuda:0"] and "A CPU" in capsys.readouterr().out


def test_calibration_that_cannot_be(monkeypatch, capsys, tmp_path):
    assert main.main(["doctor", "--write", "x.json"]) == 1
    assert "Try: wholestep doctor --calibrate --write" in capsys.readouterr().err
    assert main.main(["doctor", "--calibrate", "--force"]) == 1
    assert "--write FILE --force" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "describe", lambda: replace(COMPLETE, torch=None, torch_problem="gone"))
    assert main.main(["doctor", "--calibrate"]) == 1
    assert "without torch: gone" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "describe", lambda: replace(COMPLETE, cuda=()))
    monkeypatch.setattr(calibration, "calibrate", lambda device: MEASURED)
    assert main.main(["doctor", "--calibrate", "--write", str(tmp_path / "absent" / "x")]) == 1
    assert "cannot be written" in capsys.readouterr().err


BUSY = replace(MEASURED, bandwidth=1e10, spread=0.8, busy="repeats of copies differ by 80%")
QUIET = replace(MEASURED, spread=0.05)
NARROW, WIDE = (replace(QUIET, instructions=flags) for flags in (("avx2",), ("avx2", "avx512f")))


@pytest.fixture
def measured(monkeypatch):
    """A machine whose measurements are given."""
    given = []
    monkeypatch.setattr(doctor, "describe", lambda: replace(COMPLETE, cuda=()))
    monkeypatch.setattr(calibration, "calibrate", lambda device: given.pop())
    return given


@pytest.mark.parametrize(
    ("before", "found", "kept"),
    [
        (None, BUSY, ""),
        (BUSY, QUIET, ""),
        (QUIET, replace(QUIET, spread=0.1), ""),  # both are good: the new one counts
        (QUIET, BUSY, "measured on a quiet machine, when repeats differed by 5% at most"),
        (MEASURED, BUSY, "measured on a quiet machine"),  # of before spreads were noted
        (BUSY, replace(BUSY, spread=0.9), "measured on a busy machine"),
        (BUSY, replace(BUSY, spread=0.7), ""),
        (QUIET, replace(QUIET, launch_seconds=5e-6), "its calls are 100% faster"),  # what disturbed it was not seen
        (QUIET, replace(QUIET, gemm={"f32": 5e10}), "its f32 products are 100% faster"),
        (replace(QUIET, name="Another CPU"), QUIET, "it describes Another CPU, 2 threads, and this is A CPU"),
        (replace(QUIET, cores=8), QUIET, "it describes A CPU, 8 threads, and this is A CPU, 2 threads"),
        (WIDE, NARROW, "it describes another A CPU, 2 threads: it has avx512f, and this one has not"),
        (QUIET, NARROW, ""),  # of before instructions were noted
    ],
)
def test_a_busy_machine_is_told_and_replaces_nothing_better(measured, capsys, tmp_path, before, found, kept):
    file = tmp_path / "mine.json"
    file.write_text("" if before is None else before.to_json())
    measured += [found, found]
    assert main.main(["doctor", "--calibrate", "--write", str(file)]) == bool(kept)
    err = capsys.readouterr().err
    assert (f"busy and looks slower than it is: {found.busy}" in err) == bool(found.busy)
    assert kept in err and ("--force" in err) == bool(kept)
    assert load_description(file) == (before if kept else found)
    assert main.main(["doctor", "--calibrate", "--write", str(file), "--force"]) == 0
    assert load_description(file) == found


def test_json_of_a_busy_machine_is_json_alone(measured, capsys):
    measured.append(BUSY)
    assert main.main(["doctor", "--calibrate", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["busy"] and shown.err.count("\n") == 1


def test_a_file_of_something_else_is_left_alone_before_anything_is_measured(measured, capsys, tmp_path):
    file = tmp_path / "thesis.json"
    file.write_text('{"chapters": 5}')
    for path, said in ((file, "not a machine description"), (tmp_path, "it is a folder")):
        assert main.main(["doctor", "--calibrate", "--write", str(path)]) == 1
        assert said in capsys.readouterr().err
    assert file.read_text() == '{"chapters": 5}'
