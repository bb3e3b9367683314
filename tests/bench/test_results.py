"""Results that merge, summaries that are made from them alone, and the profile's reading of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.networks.bars import BARS
from wholestep.bench import page, profile, summary
from wholestep.bench.contenders import CONTENDERS
from wholestep.bench.record import record
from wholestep.bench.results import Results
from wholestep.bench.summary import BEST, UNPLANNED, Bar, Table, contender_rows
from wholestep.bench.trace import bytes_of, ran_on_device, ran_on_host
from wholestep.bench.workload import Case
from wholestep.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
WHERE = {"machine": "a GPU", "versions": {"torch": "2.13.0"}}


def entry(network: str, contender: str, ms: float, **more: Any) -> dict[str, Any]:
    found = {"network": network, "size": "full", "contender": contender, "status": "agrees", "race": "one"}
    found |= {"device": "cuda", "precision": "bf16", "date": "2026-01-01 00:00:00", "items": "8 rows"}
    found |= {"ms": {"median": ms, "low": ms, "high": ms}, "peak_bytes": 100 * ms, "compile_seconds": ms}
    return {**found, **WHERE, "losses": [1.0, 0.5], "tolerance": 0.01, **more}


def canned() -> list[dict[str, Any]]:
    return [
        entry("a", "wholestep", 8.0, facts={"moved / bound": 1.4}),
        entry("a", "eager", 20.0),
        entry("a", "compile", 10.0),
        entry("a", "compile-max-autotune", 1.0, status="disagrees", distance=0.5),
        entry("b", "wholestep", 6.0, facts={"moved / bound": 1.7}),
        entry("b", "eager", 5.0, race="two"),
        entry("b", "compile", 15.0),
        entry("b", "compile-max-autotune", 1.0, status="failed", why="it crashed"),
    ]


BOTH = (("a", "full"), ("b", "full"))


def bar(over: str, against: str, most: float, figure: str = "ms", cases: Any = BOTH) -> Bar:
    return Bar("what", "cuda", figure, cases, over, against, most)


def test_means_and_worst_cases_are_those_of_contenders_that_agree() -> None:
    table = Table(canned())
    mean = table.outcome(bar("mean", "compile", 0.6))
    assert mean.value == pytest.approx((0.8 * 0.4) ** 0.5) and mean.verdict == "yes" and mean.mixed == 0
    best = table.outcome(bar("worst", BEST, 1.0))
    assert best.value == pytest.approx(1.2) and best.verdict == "no" and best.worst == "b@full 1.20"
    assert best.mixed == 1  # eager of b is of another run
    compiled = table.outcome(bar("mean", BEST, 0.6, "compile_seconds"))
    assert compiled.value == mean.value  # eager compiles nothing: it is not the best
    assert table.outcome(bar("worst", "", 1.8, "moved / bound")).value == 1.7
    absent = table.outcome(bar("mean", "compile", 0.6, cases=(*BOTH, ("c", "full"))))
    assert absent.verdict == "2 of 3 measured"
    assert table.outcome(bar("mean", "compile", 0.6, cases=(("c", "full"),))).verdict == "not measured"


def test_figures_of_ours_alone() -> None:
    facts = {"planned_peak": 1000, "moved / bound": 1.2}
    table = Table([entry("a", "wholestep", 8.0, facts=facts, host_us_row=120.0, allocated_bytes=1305, batch_bytes=300)])
    one = (("a", "full"),)
    host = table.outcome(bar("worst", "", 100, "host_us_row", one))
    assert host.value == 120.0 and host.verdict == "no" and host.worst == "a@full 120"
    off = table.outcome(bar("worst", "", 0.01, UNPLANNED, one))
    assert off.value == pytest.approx(0.005) and off.verdict == "yes" and off.worst == "a@full 0.005"


def test_a_ratio_stays_that_of_the_run_in_which_both_were_measured() -> None:
    """Ours of a later run takes the place of the one before; those that raced that one keep its figures."""
    results = Results(canned())
    results.merge(entry("a", "wholestep", 4.0, race="later"))
    results.merge(entry("a", "compile-max-autotune", 5.0, race="later"))
    table, case = Table(results.entries), ("a", "full")
    assert table.ratio(case, "compile", "ms") == (0.8, "compile") and table.one_run(case, "compile")
    assert table.ratio(case, "compile-max-autotune", "ms") == (0.8, "compile-max-autotune")
    assert table.ratio(case, "eager", "peak_bytes") == (0.4, "eager")
    results.merge(entry("b", "wholestep", 7.0, race="later"))
    table = Table(results.entries)
    assert table.ratio(("b", "full"), "compile", "ms") == (0.4, "compile")
    assert not table.one_run(("b", "full"), "eager")  # it raced neither
    results.merge(entry("a", "compile", 2.0, race="later"))  # the best is the one that ours is the least ahead of
    assert Table(results.entries).ratio(case, BEST, "ms") == (2.0, "compile")
    results.merge(entry("a", "wholestep", 4.8, race="alone"))
    said = summary.remarks(Table(results.entries), [bar("worst", BEST, 1.0)])
    assert any(remark.endswith("took longer than beside them: a@full 1.20, b@full 1.17 times.") for remark in said)
    results.merge(entry("a", "wholestep", 4.0, status="disagrees", race="wrong", distance=0.5))
    assert Table(results.entries).ratio(case, "compile", "ms") is None  # what it was once does not count


def test_who_is_missing_and_what_others_take() -> None:
    results, case = Results(canned()), Case("b", "full")
    names = ["eager", "compile", "compile-reduce-overhead", "jax"]
    assert results.missing(case, names, "bf16", WHERE) == ["eager", "compile-reduce-overhead", "jax"]
    assert results.missing(case, names, "fp32", WHERE) == names
    for row in results.rows(case, "bf16", WHERE):
        row["beside"] = 3
    assert results.missing(case, names, "bf16", WHERE) == names  # (it is to compile alone)
    for row in results.rows(case, "bf16", WHERE):
        row["beside"] = 0
    costs = results.costs(case, [*names, "wholestep", "aten"], "bf16", WHERE)
    assert {name: cost.bytes for name, cost in costs.items()} == {
        "eager": 500.0,
        "compile": 1500.0,
        "compile-reduce-overhead": 1500.0,  # as another mode
        "jax": 500.0,  # as eager
        "wholestep": 600.0,
        "aten": 500.0,
    }
    assert results.costs(Case("c", "full"), names, "bf16", WHERE) == {}


def test_every_contender_has_a_colour_of_its_own() -> None:
    assert set(page.COLOURS) == set(CONTENDERS) and len(set(page.COLOURS.values())) == len(CONTENDERS)


def test_budgets_and_variants_are_shown_and_are_no_rivals() -> None:
    entries = [
        entry("a", "wholestep", 8.0),
        entry("a", "eager", 20.0),
        entry("a", "wholestep:0.5", 9.0, peak_bytes=400.0, warm=True),
        entry("a", "wholestep:0.7", 8.5, peak_bytes=600.0, warm=True),
        entry("a", "compile:0.3", 1.0, peak_bytes=1.0),
        entry("a", "checkpoint", 2.0, peak_bytes=1.0),
        entry("a", "aten", 3.0),
    ]
    for each in entries:
        each |= {"distance": 0.001, "command": "wholestep bench a"}
    table = Table(entries)
    assert table.ratio(("a", "full"), BEST, "ms") is None  # no compiler took part
    assert Table([*entries, entry("a", "compile", 25.0)]).ratio(("a", "full"), BEST, "ms") == (0.4, "eager")
    order = [row[1] for row in contender_rows(table)[1]]
    assert order == ["wholestep", "wholestep:0.7", "wholestep:0.5", "eager", "compile:0.3", "aten", "checkpoint"]
    text = record(entries)
    assert "| wholestep:0.7 | 8.50 |" in text and "8.5 (warm)" in text and "0.10% of 1.00%, 2 steps" in text
    waiting = entry(
        "a", "offload:0.5", 12.0, facts={"host_bytes": 620_000_000}, distance=0.0, command="wholestep bench a"
    )
    assert "host memory: offload:0.5 0.62 GB." in record([*entries, waiting]) and "host memory: " not in text
    drawn = page.plots(entries)["bench_memory_a_full_cuda_bf16.svg"]
    assert drawn.count("<polyline") == 5
    assert "bench_memory_b_full_cuda_bf16.svg" not in page.plots(canned())


def test_bars_name_networks_that_there_are() -> None:
    from bench.networks import SIZES, TWELVE

    assert {device for device in (b.device for b in BARS)} == {"cuda", "cpu"}
    assert all(name in TWELVE and size in SIZES for b in BARS for name, size in b.cases)


def test_merging_replaces_an_entry_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "bench.json"
    results = Results(canned())
    results.merge(entry("a", "compile", 9.0, losses=[1.0, float("nan")]))
    results.merge(entry("a", "compile", 7.0, machine="another GPU"))
    results.add_to(file)
    again = Results.load(file)
    assert len(again.entries) == len(canned()) + 1
    (mine,) = [e for e in again.entries if (e["network"], e["contender"], e["machine"]) == ("a", "compile", "a GPU")]
    assert mine["ms"]["median"] == 9.0 and mine["losses"] == [1.0, None]
    known = again.reference(Case("a", "full"), "bf16", WHERE, 2)
    assert known is not None and known.losses == [1.0, 0.5]
    assert again.reference(Case("a", "full"), "bf16", WHERE, 3) is None
    loose = Results([entry("a", "eager", 20.0, tolerance=0.3)])
    assert loose.reference(Case("a", "full"), "bf16", WHERE, 2) is None  # one limit for all steps, which says little
    loose.entries[0]["limits"] = [0.01, 0.3]
    known = loose.reference(Case("a", "full"), "bf16", WHERE, 2)
    assert known is not None and (list(known.allowed), known.tolerance) == ([0.01, 0.3], 0.3)
    assert again.reference(Case("a", "full"), "bf16", WHERE | {"machine": "another GPU"}, 2) is None
    assert Results.load(tmp_path / "none.json").entries == []
    file.write_text('{"entries": []}')
    with pytest.raises(InputError, match="does not hold results"):
        Results.load(file)


def test_runs_that_write_to_one_file_keep_each_others_results(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    one, other = Results(), Results()
    one.merge(entry("a", "eager", 1.0))
    one.add_to(file)
    other.merge(entry("b", "eager", 2.0))
    other.add_to(file)
    one.merge(entry("c", "eager", 3.0))
    assert [e["network"] for e in one.add_to(file).entries] == ["a", "b", "c"]


def test_who_had_no_time_leaves_what_was_measured() -> None:
    results = Results(canned())
    late: dict[str, Any] = {"status": "failed", "why": "no time was left for all", "unfinished": True}
    results.merge(entry("a", "compile", 1.0, **late))
    results.merge(entry("c", "compile", 1.0, **late))
    results.merge(entry("a", "eager", 1.0, status="failed", why="it crashed", unfinished=False))
    found = {(e["network"], e["contender"]): e["status"] for e in results.entries}
    assert found["a", "compile"] == "agrees" and found["c", "compile"] == found["a", "eager"] == "failed"


def test_compile_times_that_others_made_longer_are_marked() -> None:
    entries = [
        entry("a", "wholestep", 8.0, alone=True, beside=0),
        entry("a", "compile", 10.0, alone=False, beside=7),
    ]
    one = (("a", "full"),)
    bars = [bar("mean", "compile", 0.9, "compile_seconds", one), bar("mean", "compile", 0.9, "ms", one)]
    text = summary.markdown(entries, bars)
    assert "| 0.80^ | yes |" in text and "| 0.80 | yes |" in text and "10.0 (beside 7) |" in text
    assert "theirs compiled beside others" in text and "different runs" not in text
    for each in entries:
        each |= {"distance": 0.001, "command": "wholestep bench a"}
    assert "| 10.0 (beside 7) |" in record(entries)


def test_the_readme_gets_a_table_between_its_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{summary.BEGIN}\nlast year\n{summary.END}\nafter\n")
    for _ in range(2):
        summary.write_between_markers(readme, summary.markdown(canned(), [bar("mean", "compile", 0.6)]))
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "last year" not in text
    assert text.count("| what | compile | ≤ 0.60 | 0.57 | yes | a@full 0.80 |") == 1
    assert "| a | 8 rows | 8.00, 0.00, 8.0 | 20.00, 0.00, 20.0 | 10.00, 0.00, 10.0 | losses disagree |" in text
    assert "of different runs" in text and "1.20 (eager*)" in text
    readme.write_text("no markers")
    with pytest.raises(InputError, match="has no place for the table"):
        summary.write_between_markers(readme, "text")


def test_the_records_of_this_checkout_are_made_from_its_json() -> None:
    """After a run: `wholestep bench --summary bench/results/bench.json` with --readme, --record and --plots."""
    results = Results.load(ROOT / "bench/results/bench.json")
    entries = results.entries
    before, after = summary.between_markers(ROOT / "README.md")
    made = {"README.md": summary.page_with(before, summary.markdown(entries, BARS), after)}
    plots = page.plots(entries)
    made["bench/results/bench.md"] = record(entries, list(plots), results.profiles)
    made |= {f"bench/results/{name}": text for name, text in plots.items()}
    drawn = {f"bench/results/{file.name}" for file in (ROOT / "bench/results").glob("bench_*.svg")}
    assert drawn == {name for name in made if name.endswith(".svg")}
    old = [name for name, text in made.items() if (ROOT / name).read_text(encoding="utf-8") != text]
    assert old == []


def test_what_the_best_was_picked_from_is_said() -> None:
    entries = [
        *canned(),
        entry("c", "eager", 5.0, tolerance=2.6),
        entry("d", "eager", 5.0, tolerance=2.6, limits=[0.1]),
    ]
    said = summary.remarks(Table(entries), [bar("worst", BEST, 1.0)])
    counts = "eager 2, compile 2, compile-reduce-overhead 0, compile-max-autotune 0, jax 0"
    assert said[0] == f"The best of all is the best of those that were measured, of 2 cases: {counts}."
    assert said[1].endswith("by the last one): c@full 260%.")
    assert said[2].startswith("Compile times, ours and others', may have Python's compiling of modules in them")
    assert said[2].endswith(": a@full, b@full.") and len(said) == 3
    assert all(remark in summary.markdown(entries, [bar("worst", BEST, 1.0)]) for remark in said)
    seen_to = [each | {"bytecode": each["network"] == "a"} for each in canned()]
    assert summary.remarks(Table(seen_to), [])[-1].endswith(": b@full.")
    assert summary.remarks(Table([each | {"bytecode": True} for each in canned()]), []) == []


def test_pages_and_plots_show_what_counts_and_why_the_rest_does_not() -> None:
    found = page.plots(canned())
    assert "bench_step_time_cuda_bf16.svg" in found and len(found) == 3
    drawn = found["bench_step_time_cuda_bf16.svg"]
    assert "a@full against compile: 0.800" in drawn and "max-autotune" not in drawn
    other = [each | {"machine": "another one"} for each in canned()]
    both = page.plots([*canned(), *other])
    assert len(both) == 6 and both["bench_step_time_cuda_bf16.svg"] == drawn
    assert "another one" in both["bench_step_time_cuda_bf16_2.svg"]
    html = page.page(canned(), [], [])
    assert "it crashed" in html and "losses disagree: 50.00% from eager" in html


# ---- the profile -----------------------------------------------------------------------------------------------------


def host(name: str, ts: float, dur: float, number: int = 0, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"Record function id": number}}


def on_device(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7, "args": {"correlation": correlation}}


def launch(ts: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1.0, "tid": tid, "args": args}


def test_kernels_are_found_inside_the_operators_that_launched_them() -> None:
    events = [
        host("ws:3", 0.0, 50.0, 1, "user_annotation"),
        host("aten::mm", 5.0, 20.0, 2),
        launch(10.0, 100),
        launch(12.0, 101),
        host("triton_poi_fused_convolution_0", 0.0, 30.0, 9, tid=2),
        launch(3.0, 102, tid=2),
        launch(60.0, 103),
        on_device("nvjet_sm90_tst_192x128", 100.0, 8.0, 100),
        on_device("splitKreduce_kernel", 108.0, 2.0, 101),
        on_device("triton_poi_fused_convolution_0", 111.0, 4.0, 102),
        on_device("Memcpy DtoD", 115.0, 1.0, 103, "gpu_memcpy"),
    ]
    ran = ran_on_device(events)
    assert [r.inside for r in ran] == [[("ws:3", 1), ("aten::mm", 2)]] * 2 + [
        [("triton_poi_fused_convolution_0", 9)],
        [],
    ]
    found = profile.summed(ran, {2: 600, 9: 40}, steps=2).to_dict()
    assert found["families"]["gemm"] == {"us": 5.0, "calls": 1.0, "bytes": 300.0}
    assert found["families"]["generated"] == {"us": 2.0, "calls": 0.5, "bytes": 20.0}
    assert found["families"]["copies"]["bytes"] is None and found["us"] == 7.5
    assert profile.by_launch(ran, 1) == {3: 10.0, -1: 5.0}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32", "convolution"),
        ("void cudnn::nchwToNhwcKernel<float, float>", "copies"),
        ("triton_red_fused_native_batch_norm_backward_convolution_backward_3", "generated"),
        ("triton_tem_fused_addmm_2", "gemm"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4>", "library"),
        ("rows", "generated"),
        ("something_else", "other"),
    ],
)
def test_families_by_name(name: str, family: str) -> None:
    assert profile.family_by_name(name) == family


def test_operators_of_a_cpu_count_the_time_that_is_their_own() -> None:
    events = [
        host("aten::linear", 0.0, 100.0, 1),
        host("aten::addmm", 10.0, 80.0, 2),
        host("aten::expand", 12.0, 50.0, 4),  # only looks at memory otherwise, so the time inside is addmm's work
        host("aten::relu", 200.0, 5.0, 3),
    ]
    own = {r.name: (r.us, bool(r.inside)) for r in ran_on_host(events, {1: 300, 2: 300, 3: 100})}
    assert own["aten::addmm"] == (30.0, True) and own["aten::linear"] == (20.0, False)
    assert own["aten::relu"] == (5.0, True) and own["aten::expand"][0] == 50.0


def test_bytes_are_those_of_operands_and_results() -> None:
    def node(number: int, schema: str, given: list[Any], made: list[Any]) -> dict[str, Any]:
        attributes = [{"name": "rf_id", "value": number}, {"name": "op_schema", "value": schema}]

        def part(values: list[Any]) -> dict[str, Any]:
            return {"values": values, "types": ["Tensor(float)"] * len(values)}

        return {"name": "op", "inputs": part(given), "outputs": part(made), "attrs": attributes}

    a, b, c = [1, 11, 0, 10, 4, "cuda"], [2, 12, 0, 20, 4, "cuda"], [3, 13, 0, 5, 2, "cuda"]
    seen = [4, 11, 0, 10, 4, "cuda"]
    found = bytes_of(
        [
            node(1, "aten::mm(Tensor self, Tensor mat2) -> Tensor", [a, b], [c]),
            node(2, "aten::mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)", [a, b, c], [c]),
            node(3, "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)", [a], [seen]),
            node(4, "aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)", [a, b], [a]),
        ]
    )
    assert found == {1: 130, 2: 130, 4: 160}


def test_a_profile_is_shown_beside_others() -> None:
    part = {"us": 10.0, "calls": 2.0, "bytes": 4e6}
    mine = {"us": 10.0, "calls": 2.0, "families": {"gemm": part}, "top": [{"name": "k", "family": "gemm"} | part]}
    theirs = mine | {"families": {"gemm": part | {"us": 4.0, "bytes": None}}}
    columns, rows = profile.table_of({"wholestep": mine, "compile": theirs})
    assert columns == ["family", "wholestep", "compile"] and rows[0] == ["gemm", "10 us, 4.0 MB", "4 us"]
    assert profile.differences({"wholestep": mine, "compile": theirs}, "wholestep") == ["gemm: 10 us, best 4 (+6)"]
    both = (("wholestep", mine), ("compile", theirs))
    listed = [entry("a", name, 1.0, profile=each, command="wholestep bench a") for name, each in both]
    text = record([], listed=listed)
    assert "## Time and bytes by kernel family: a@full on " in text and "| family | wholestep | compile |" in text
    assert text.endswith("\n`wholestep bench a`\n") and "family:" not in record([])
    assert profile.top_rows(mine, 5) == [["gemm", "k", "10.0", "2", "4.00", "400"]]
    assert json.dumps(mine)
