"""Calibration: what can be judged without a GPU, and the whole of it where there is one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from wholestep.errors import InputError
from wholestep.machine import calibrate as calibration
from wholestep.machine import description as descriptions
from wholestep.machine.calibrate import Stopwatch, cache_end, cpu_cache_bytes, judge_cache, judged
from wholestep.machine.description import (
    Description,
    difference,
    find_description,
    from_json,
    load_description,
    shipped,
    why_undescribed,
)
from wholestep.machine.neighbours import (
    Neighbours,
    gpu_in_use,
    judge_gpu,
    judge_load,
    judge_waiting,
    seconds_waited,
)


def test_the_last_cache_is_the_largest(tmp_path):
    for number, size in enumerate(["32K", "512K", "32M", "strange"]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert cpu_cache_bytes(str(tmp_path)) == 32 << 20
    assert cpu_cache_bytes(str(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("costs", "end"),
    [
        ([1.0, 1.0, 2.0, 2.0], 0.75),  # half-way between the second and the third size
        ([1.2, 1.0, 1.0, 2.0], 2.5),
        ([1.0, 1.05, 1.02, 1.1], None),  # no cache to be seen
        ([3.0, 1.0, 1.4, 1.6], 0.5 + 0.5 * 0.3 / 0.4),  # a slow first size is none
    ],
)
def test_the_end_of_the_cache(costs, end):
    found = cache_end([0.25, 0.5, 1.0, 4.0], costs)
    assert found == (None if end is None else pytest.approx(end))


def test_a_cache_is_told_from_memory_although_every_kernel_costs_something():
    """Six bytes per unit of time from a cache of 90, four from memory, three units for a kernel of any size."""
    sizes = [25, 37, 50, 62, 75, 87, 100, 112, 125, 150, 400]
    share, rate, why = judge_cache(sizes, [3 + size / (6 if size <= 90 else 4) for size in sizes], 100)
    assert 0.87 < share < 1 and rate == pytest.approx(6) and why == ""
    share, rate, why = judge_cache(sizes, [3 + size / 6 for size in sizes], 100)
    assert share is None and rate == pytest.approx(6) and "less than" in why
    assert judge_cache(sizes, [1.0] * len(sizes), 100)[:2] == (None, None)


def test_descriptions_tell_how_much_cache_to_count_on():
    assert Description("x", "cuda", 1e12, cache_bytes=1000, cache_share=0.5).effective_cache == 500
    assert Description("x", "cuda", 1e12, cache_bytes=1000).effective_cache == 1000
    assert Description("x", "cuda", 1e12).effective_cache is None
    for _, found in shipped():
        assert found.cache_bytes and "cache_bytes" in found.sources


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_share": 1.5}, "at most 1"),
        ({"cache_bytes": -1}, "no speed"),
        ({"read_bandwidth": "fast"}, "no speed"),
        ({"spread": "wide"}, "it is a share"),
        ({"busy": 1}, "are text"),
        ({"instructions": "avx2"}, "a list of names"),
        ({"instructions": [2]}, "a list of names"),
    ],
)
def test_bad_figures_are_refused(change, message):
    text = json.loads(Description("x", "cuda", 1e12).to_json()) | change
    with pytest.raises(InputError, match=message):
        from_json(json.dumps(text), "file")


def test_repeats_that_disagree_are_noted():
    times = iter([9.0, 1.0, 1.1, 1.0, 1.2, 1.0, 1.05, 8.0, 9.0, *[1.0] * 7])  # the first is no repeat, one counts less
    spreads: dict[str, float] = {}
    watch = Stopwatch(lambda run: next(times), spreads)
    assert watch.median("copies", lambda: None) == 1.05
    assert watch.median("copies", lambda: None) == 1.0
    assert spreads["copies"] == pytest.approx(0.2 / 1.05)  # the worst of both
    watch.again(2e9, 3e9)
    found = judged(Description("x", "cpu", 1e9), spreads, "")
    assert found.spread == 0.5 and found.busy == "repeats of copies at the start and at the end differ by 50%"
    found = judged(Description("x", "cpu", 1e9), {"copies": 0.05}, "programs waited")
    assert found.spread == 0.05 and found.busy == "programs waited" and from_json(found.to_json(), "it") == found
    assert judged(Description("x", "cpu", 1e9), {"copies": 0.05}, "").busy == ""


def test_who_else_is_at_work(tmp_path):
    assert judge_waiting(1.0, 2.0) == "programs waited for a CPU 50% of the time" and judge_waiting(0.1, 2.0) == ""
    assert judge_load(0.4, 2, 2) == "" and judge_load(20.0, 8, 64) == "" and judge_load(None, 2, 2) == ""
    assert judge_load(1.5, 2, 2) == "the load was 1.5 before, and 2 of 2 cores are measured"
    assert judge_gpu(None) == judge_gpu(0.0) == "" and "80%" in judge_gpu(0.8)
    assert gpu_in_use(SimpleNamespace(cuda=SimpleNamespace(utilization=lambda device: 80)), "cuda:0") == 0.8
    assert gpu_in_use(SimpleNamespace(cuda=SimpleNamespace()), "cuda:0") is None  # cannot be asked
    file = tmp_path / "cpu"
    file.write_text("some avg10=1.5 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=7\n")
    assert seconds_waited(str(file)) == 2.5 and seconds_waited(str(tmp_path / "absent")) is None
    neighbours = Neighbours(torch, "cpu", str(file))
    assert neighbours.at_work() == ""
    file.write_text("some total=9000002500000\n")
    assert neighbours.at_work().startswith("programs waited for a CPU")


def test_a_cpu_of_the_same_name_with_other_instructions_is_another_one(monkeypatch):
    monkeypatch.delenv("WHOLESTEP_MACHINE", raising=False)
    cpu = load_description("epyc-2-cores")
    assert cpu.instructions == ("avx2", "avx512f", "avx512_bf16") and "inferred" in cpu.sources["instructions"]
    assert cpu.gemm["bf16"] > 2 * cpu.gemm["f32"]  # what that was inferred from
    older = load_description("epyc-avx2-2-cores")
    assert older.instructions == ("avx2",) and older.gemm["bf16"] < 0.1 * older.gemm["f32"]
    found = []
    for given in (cpu.instructions, ("avx2",), ("avx2", "avx512f"), (*cpu.instructions, "amx_bf16")):
        monkeypatch.setattr(descriptions, "rate_flags", lambda given=given: given)
        found.append((find_description(cpu.name, 2), why_undescribed(cpu.name, 2)))
    another = "another AMD EPYC is described as epyc-2-cores: it has"
    assert found == [
        (cpu, ""),
        (older, ""),
        (None, f"{another} avx512_bf16, and this one has not"),
        (None, f"{another} no amx_bf16, and this one has"),
    ]
    assert why_undescribed(cpu.name, 8) == "another AMD EPYC is described as epyc-2-cores: it is of 2 cores, not of 8"
    assert why_undescribed("another", 2) == ""
    assert difference(Description("x", "cpu", 1e9), 2) == ""  # nobody noted them
    monkeypatch.setenv("WHOLESTEP_MACHINE", "epyc-2-cores")  # whoever names one gets it
    assert find_description(cpu.name, 2) == cpu and why_undescribed(cpu.name, 2) == ""


def test_instructions_are_kept_in_a_description(monkeypatch):
    found = Description("x", "cpu", 1e9, instructions=("avx2", "amx_bf16"))
    assert from_json(found.to_json(), "it") == found
    monkeypatch.setattr(calibration, "rate_flags", lambda: ("avx2", "avx512f"))
    for name in ("copy_bandwidth", "gemm_rate", "launch_cost"):
        monkeypatch.setattr(calibration, name, lambda *given: 1.0)
    found = calibration.calibrate_cpu(torch, Stopwatch(calibration.cpu_clock, {}))
    assert found.instructions == ("avx2", "avx512f") and "instructions" in found.sources


def test_the_variable_is_named_where_it_leads_nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("WHOLESTEP_MACHINE", str(tmp_path / "absent.json"))
    with pytest.raises(InputError, match=r"WHOLESTEP_MACHINE=.*absent.json.*Try: unset WHOLESTEP_MACHINE"):
        find_description("x")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_measured_whole():
    before = torch.get_float32_matmul_precision()
    found = calibration.calibrate("cuda:0")
    assert torch.get_float32_matmul_precision() == before
    assert set(found.gemm) == {"f64", "f32", "tf32", "bf16", "f16"} and found.gemm["bf16"] > found.gemm["f32"] > 1e12
    assert found.graph_launch_seconds < found.launch_seconds < 1e-4
    assert found.read_bandwidth > 1e11 and found.write_bandwidth > 1e11
    assert found.cache_share is None or 0.1 < found.cache_share <= 1
    assert set(found.links) == {"host_to_device", "device_to_host"}
    assert from_json(found.to_json(), "it") == found
