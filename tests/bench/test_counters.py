"""Counters joined with a plan, on a table as ncu prints it; running ncu itself takes a GPU."""

from __future__ import annotations

import csv
import io

import pytest

from bench.counters import READ, TIME, WRITTEN, Kernel, compare, held_in_cache, parse, passes_of

MB = 1_000_000
NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def table(rows: list[tuple], units: tuple[str, str, str] = ("byte", "byte", "ns")) -> str:
    """ncu's raw page: rows are (range, read, written, time)."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Process ID", NVTX, "Kernel Name", READ, WRITTEN, TIME])
    writer.writerow(["", "", "", "", *units])
    for number, (where, *figures) in enumerate(rows):
        ranges = f'7  "<default domain>:{where}:none:none:none:none:none:none" ' if where else ""
        writer.writerow([number, 7, ranges, "void kernel(int)", *figures])
    return f"==PROF== Connected to process 7\n{out.getvalue()}"


def test_kernels_are_read_with_their_ranges_and_units():
    text = table([("ws:3", "1,000", "2", "5"), ("", "1", "1", "1"), ("other", "n/a", "1", "1")])
    first, second, third = parse(text)
    assert first == Kernel(3, "void kernel(int)", 1000.0, 2.0, 5.0)
    assert second.launch == third.launch == -1 and third.read != third.read
    (scaled,) = parse(table([("ws:0", "1.5", "2", "3")], ("Mbyte", "Kbyte", "us")))
    assert (scaled.read, scaled.written, scaled.ns) == (1.5e6, 2e3, 3e3)
    with pytest.raises(ValueError, match="no table"):
        parse("==ERROR== the driver refused")


def predicted() -> dict:
    names = ["step.contract", "step.add", "step.cast", "copy", "step.contract"]
    launches = [
        {"name": n, "phase": "forward", "layer": f"h.{i}.mlp", "provider": "copy" if n == "copy" else "aten"}
        for i, n in enumerate(names)
    ]
    pairs = [[10 * MB, 5 * MB], [8 * MB, 4 * MB], [0, 0], [2 * MB, 2 * MB], [10 * MB, 5 * MB]]
    return {"launches": launches, "models": {"plan": pairs, "cache": pairs}, "sweep": {"0.5": pairs}}


def test_launches_are_compared_with_the_sum_of_their_kernels():
    kernels = [
        Kernel(0, "gemm", 6 * MB, 5 * MB, 10),
        Kernel(0, "splitk", 4 * MB, 0, 10),
        Kernel(1, "add", 4 * MB, 4 * MB, 10),
        Kernel(4, "gemm", 10 * MB, 5 * MB, 10),
        Kernel(-1, "other", 1 * MB, 0, 10),
    ]
    found = compare(predicted(), kernels, stopped_early=False)
    assert (found["seen"], found["covered"], found["kernels"]) == (3, 5, 5)
    assert found["not_seen"] == {"launches": 1, "bytes": 4 * MB, "names": {"copy": 1}}
    assert found["outside"] == {"kernels": 1, "read": MB, "written": 0}
    assert found["measured"] == [24 * MB, 14 * MB]
    errors = found["models"]["cache"]
    assert errors["ratio"] == pytest.approx(42 / 38) and errors["weighted"] == pytest.approx(4 / 38)
    assert errors["median"] == 0 and errors["p90"] == pytest.approx(0.5)
    assert found["kinds"]["step.contract"]["kernels"] == 3 and found["kinds"]["step.add"]["cache"]["ratio"] == 1.5
    assert found["worst"][0]["name"] == "step.add" and found["worst"][0]["layer"] == "h.*.mlp"
    early = compare(predicted(), kernels, stopped_early=True)
    assert early["covered"] == 4 and early["seen"] == 2


def test_the_probe_tells_what_the_cache_still_held():
    kernels = [Kernel(2, "sum", 100, 0, 1), Kernel(5, "sum", 0, 0, 1), Kernel(8, "sum", 2000, 0, 1)]
    first, second = held_in_cache({"sizes": [1000, 2000], "cache_bytes": 4000}, kernels)
    assert first == {"bytes": 1000, "share_of_l2": 0.25, "missed_after_read": 0.1, "missed_after_write": 0.0}
    assert second["missed_after_read"] == 1.0 and second["missed_after_write"] != second["missed_after_write"]


def test_passes_are_counted():
    said = '==PROF== Profiling "a" - 0: 0%....100% - 1 pass\n==PROF== Profiling "b" - 1: 0%....100% - 2 passes\n'
    assert passes_of(said) == {"1": 1, "2": 1}
