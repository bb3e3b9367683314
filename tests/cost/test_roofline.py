"""Time on described machines by hand, the descriptions themselves, and measuring one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.cost.models import language_step, moved
from wholestep.cli.console import Console
from wholestep.cli.doctor import show_speed
from wholestep.cost import Kernel, Ledger, Move, roofline
from wholestep.errors import InputError
from wholestep.ir.core import Location
from wholestep.machine import calibrate as calibration
from wholestep.machine.description import (
    VARIABLE,
    Description,
    find_description,
    from_json,
    load_description,
    shipped,
)

MACHINE = Description("toy", "cpu", bandwidth=1e9, gemm={"f32": 1e12}, launch_seconds=1e-6)


def kernel(size: int, flops: int = 0, matrix: bool = False, element: str = "f32", times: int = 1) -> Kernel:
    moves = [Move(0, False, size, "batch")]
    return Kernel("k", "forward", Location(), times, times, flops, element, matrix, moves=moves)


LEDGER = Ledger([kernel(2000), kernel(1000, 5_000_000, True), kernel(1000, 5_000_000), kernel(100, times=3)], [])


def test_each_kernel_is_as_slow_as_its_slowest_limit():
    found = roofline(LEDGER, MACHINE)
    assert found.kernels == pytest.approx([2e-6 + 1e-6, 5e-6 + 1e-6, 1e-6 + 1e-6, 0.3e-6 + 3e-6])
    assert found.seconds == pytest.approx(sum(found.kernels))
    assert (found.memory, found.compute, found.launch) == pytest.approx((3.3e-6, 5e-6, 6e-6))
    assert found.unknown == []


def test_queued_launches_hide_behind_work():
    gpu = Description("toy", "cuda", bandwidth=1e9, gemm={"f32": 1e12}, launch_seconds=1e-6, overlapped=True)
    found = roofline(LEDGER, gpu)
    assert found.kernels == pytest.approx([2e-6, 5e-6, 1e-6, 3e-6])
    assert found.seconds == pytest.approx(found.memory + found.compute + found.launch)


def test_what_is_not_known_is_said():
    found = roofline(Ledger([kernel(1000, 10**9, True, "f64")], []), Description("toy", "cpu", 1e9))
    assert found.unknown == ["launch cost", "GEMM rate of f64"]
    assert found.seconds == pytest.approx(1e-6)


def test_flops_of_a_step_are_those_of_its_ops():
    ledger = moved(language_step()).ledger
    products = sum(k.times * k.flops for k in ledger.kernels if k.name == "contract")
    # 32 tokens; per block 16x48 + 16x16 + 2 x 16x64, then 16x50; forward and two backward products each
    assert products == 2 * 32 * 3 * (2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 16 * 50)
    assert ledger.flops > products


def test_shipped_descriptions_say_where_their_figures_are_from():
    known = dict(shipped())
    assert known["h200"].name == "NVIDIA H200" and 3.5e12 < known["h200"].bandwidth < 4.8e12  # the vendor's: 4.8 TB/s
    assert 4e14 < known["h200"].gemm["bf16"] < 9.9e14  # the vendor's: 989 Tflop/s
    assert any(d.kind == "cpu" for d in known.values())
    for description in known.values():
        assert {"bandwidth", "gemm", "launch_seconds"} <= set(description.sources)
        assert description.overlapped == (description.kind == "cuda")


def test_doctor_shows_every_figure_there_is(capsys):
    show_speed(MACHINE, Console())
    plain = capsys.readouterr().out
    assert "cache" not in plain and "reading" not in plain and "graph" not in plain
    more = replace(
        MACHINE, read_bandwidth=3e9, write_bandwidth=2e9, graph_launch_seconds=4e-6, cache_bytes=50_000_000,
        cache_share=0.75, cache_bandwidth=9e9,
    )  # fmt: skip
    show_speed(more, Console())
    shown = capsys.readouterr().out
    for figure in ("1.0 GB/s", "3.0 GB/s", "2.0 GB/s", "4.00 us", "50.0 MB", "75%", "9.0 GB/s"):
        assert figure in shown


def test_a_description_is_found_by_name_and_cores(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    cpu = next(d for _, d in shipped() if d.kind == "cpu")
    assert find_description(cpu.name, cpu.cores, cpu.instructions) == cpu
    assert find_description(cpu.name, cpu.cores + 1, cpu.instructions) is None
    assert find_description("NVIDIA H200") == load_description("h200")
    assert find_description("another") is None
    file = tmp_path / "mine.json"
    file.write_text(MACHINE.to_json())
    monkeypatch.setenv(VARIABLE, str(file))
    assert find_description("another") == MACHINE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": -1}, "no speed"),
        ({"bandwidth": "fast"}, "no speed"),
        ({"gemm": {"f32": 0}}, "no speed"),
        ({"gemm": [1]}, "table"),
        ({"speed": 1}, "'speed' is not known"),
        ({"kind": "tpu"}, "cpu"),
        ({"format": "x"}, "doctor --calibrate"),
    ],
)
def test_bad_descriptions_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_json(json.dumps(json.loads(MACHINE.to_json()) | change), "file")


def test_absent_and_broken_files(tmp_path):
    with pytest.raises(InputError, match=r"one of .*h200"):
        load_description("no-such-machine")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="not a machine description"):
        load_description(tmp_path / "x.json")


def test_calibration_measures_this_cpu(monkeypatch):
    monkeypatch.setattr(calibration, "REPEATS", 3)
    monkeypatch.setattr(calibration, "CALLS", 200)
    monkeypatch.setattr(calibration, "LONG_ENOUGH", 1e-3)
    found = calibration.calibrate()
    assert found.kind == "cpu" and found.cores == torch.get_num_threads() and not found.overlapped
    assert set(found.gemm) == {"f64", "f32", "bf16", "f16"}
    assert 1e8 < found.bandwidth < 1e13 and 1e-8 < found.launch_seconds < 1e-3
    assert min(found.gemm.values()) > 1e7
    assert from_json(found.to_json(), "it") == found


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calibration_measures_a_cuda_device():
    found = calibration.calibrate("cuda:0")
    assert found.kind == "cuda" and found.overlapped and set(found.links) == {"host_to_device", "device_to_host"}
    assert found.gemm["bf16"] > found.gemm["f32"] > 1e12 and found.bandwidth > 1e11
