"""Generated Triton kernels: right in the interpreter, compiled for sm_90, with reasons where there is no kernel.

Triton reads TRITON_INTERPRET when it is imported, so the numbers are checked in a child process (`generated_cases.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import warm
from tests.backends.triton.kernels import (
    CHANNELS_LAST,
    T,
    case,
    dropout,
    enlarged_loss,
    norm_grad,
    of_step,
    rope,
    statistics,
)
from wholestep.backends.depthwise import Generated
from wholestep.backends.kernels import Spec
from wholestep.backends.triton import compiling, generate, launch, scalars, worker
from wholestep.backends.triton.families import Family
from wholestep.dialects.step.base import torch_dtype
from wholestep.errors import InputError
from wholestep.ir.core import Op
from wholestep.ir.types import BF16, F32, I64, ScalarType


@pytest.mark.parametrize("part", ["test_function", "not test_function"])
def test_numbers_in_the_interpreter(part):
    pytest.importorskip("triton")
    done = warm.run(
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "-k", part,
         "tests/backends/triton/generated_cases.py"],
        os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]


def specs_of(kernel: Op, orders: dict[int, tuple[int, ...]] | None = None) -> list[Spec]:
    """Layouts of arguments from their types, and orders of dimensions in memory; nothing is allocated."""
    found = []
    for i, argument in enumerate(kernel.regions[0].block.arguments):
        shape, strides, step = argument.type.shape, [0] * argument.type.rank, 1
        for dim in reversed((orders or {}).get(i, range(len(shape)))):
            strides[dim], step = step, step * shape[dim]
        found.append(Spec(shape, tuple(strides), torch_dtype(argument.type.element)))
    return found


def first(types, body, orders=None) -> generate.Candidate:
    kernel = of_step(types, body)
    specs = specs_of(kernel, orders)
    assert generate.why_not(kernel, specs) == ""
    return generate.candidates(kernel, specs)[0]


#: logits, labels and what else the loss of enlarged images is computed from
ENLARGED = [T(16, 21, 60, 60, e=BF16), T(16, 480, 480, e=I64), T(16, 480, 480), T()]


def training_kernels() -> dict[str, generate.Candidate]:
    """Kernels of real steps at real size."""
    rows, image = T(8192, 768, e=BF16), T(64, 64, 56, 56, e=BF16)
    column = T(8192, 1)
    return {
        "gelu": first([T(8192, 3072, e=BF16)], lambda b, x: b.gelu(x)),
        "transpose": first([T(8192, 3072, e=BF16)], lambda b, x: b.transpose(b.exp(x), order=(1, 0))),
        "rope": first([T(8, 12, 1024, 64, e=BF16), T(1024, 64), T(1024, 64)], rope),
        "dropout": first([T(3, e=I64), rows], dropout),
        "softmax": first([T(2048, 50257, e=BF16)], lambda b, x: b.softmax(x, dim=1)),
        "layer_norm_grad": first([rows, rows, column, column, T(768, e=BF16), rows], norm_grad),
        "cross_entropy": first([T(8192, 50257, e=BF16), T(8192, e=I64)], lambda b, x, t: b.cross_entropy(x, t)),
        "column_sum": first([T(8192, 3072, e=BF16)], lambda b, x: b.sum(x, dims=(0,))),
        "enlarged_loss": first(ENLARGED, enlarged_loss((8, 8)), {0: CHANNELS_LAST}),
        "statistics": first([image], statistics),
        "statistics_channels_last": first([image], statistics, {0: CHANNELS_LAST}),
    }


@pytest.mark.parametrize("fn", ["tanh", "erf"])
def test_what_is_added_to_1_is_not_made_exact_near_0(fn):
    """A function, 1 more than it, and what 1 has over its square."""
    of = lambda body: first([T(64, e=BF16)], lambda b, x: body(b, getattr(b, fn)(x))).source  # noqa: E731
    near = f"< {scalars.NEAR_0[fn][1]}"
    assert near in of(lambda b, y: y) and near in of(lambda b, y: [b.add(y, 1.0), b.mul(y, 2.0)])
    assert near not in of(lambda b, y: [b.add(y, 1.0), b.sub(1.0, b.mul(y, y))])


def test_every_family_compiles_for_hopper():
    triton = pytest.importorskip("triton")
    if not Path(triton.knobs.nvidia.ptxas.path).exists():
        pytest.skip("ptxas is not there")
    kernels = training_kernels()
    seen: list[tuple[int, int]] = []
    infos = generate.compile_for(list(kernels.values()), 90, lambda done, total: seen.append((done, total)))
    for name, candidate in kernels.items():
        info = infos[candidate.key]
        assert not isinstance(info, Exception), f"{name}: {info}"
        assert 0 < info.registers <= 255 and info.spills == 0 and info.shared <= 227 * 1024, (name, info)
    assert seen[-1][0] == seen[-1][1]
    again = generate.compile_for(list(kernels.values())[:1])
    assert all(info.seconds == 0 for info in again.values() if not isinstance(info, Exception))  # from the cache


def test_a_gpu_of_another_architecture_has_kernels_of_its_own(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    candidate = first([T(96)], lambda b, x: b.exp(x))
    jobs = [generate.jobs_of([candidate], capability) for capability in (80, 90)]
    assert len(jobs[0]) == len(jobs[1]) == 1 and not jobs[0].keys() & jobs[1].keys()
    for capability, again in ((90, False), (80, False), (90, True), (80, True)):
        (info,) = generate.compile_for([candidate], capability).values()
        assert not isinstance(info, Exception) and (info.seconds == 0) is again
    names = {json.loads(note.read_text())["hash"] for note in (tmp_path / "wholestep").glob("*.json")}
    assert len(names) == 2


def test_what_candidates_share_is_compiled_once():
    pytest.importorskip("triton")
    kernel = of_step([T(8192, 3072, e=BF16)], lambda b, x: b.sum(x, dims=(0,)))
    made = generate.candidates(kernel, specs_of(kernel))
    functions, jobs = [f for c in made for f in c.functions], generate.jobs_of(made, 90).values()
    assert {f.name for f in functions} == {"sums", "finish"} and len(jobs) < len(functions)
    for job in jobs:
        assert job["source"].count("@triton.jit") == 1 and f"def {job['name']}(" in job["source"]
    calls = {"near": "", "far": "near()", "one": "far()", "two": "near()"}
    source = "\n\n".join(f"@triton.jit\ndef {name}():\n    {called}\n" for name, called in calls.items())
    assert re.findall(r"def (\w+)", compiling.alone(source, "one")) == ["near", "far", "one"]


def test_ways_are_written_when_they_are_looked_at(monkeypatch):
    kernel = of_step([T(8192, 3072, e=BF16)], lambda b, x: b.sum(x, dims=(0,)))
    wrote, write = [], Family.written
    monkeypatch.setattr(Family, "written", lambda self, config: (wrote.append(str(config)), write(self, config))[1])
    assert generate.why_not(kernel, specs_of(kernel)) == ""
    made = generate.candidates(kernel, specs_of(kernel))
    assert wrote == [made[0].name] and len(made) > 3
    assert made[0].source and made[0].key != made[1].key  # (the first is not written again)
    assert wrote == [c.name for c in made[:2]]
    assert [c.name for c in generate.candidates(kernel, specs_of(kernel), made[2].name)] == [made[2].name]
    assert isinstance(made[2], generate.Candidate) and made[2].batched is None and made[2].likely


def test_a_broken_kernel_does_not_stop_the_others():
    pytest.importorskip("triton")
    good = first([T(64)], lambda b, x: b.neg(x))
    broken = generate.Candidate(
        "broken", (), "b", good.source.replace("tl.store", "tl.sotre"), good.functions, good.pointers
    )
    infos = generate.compile_for([broken, good])
    assert "sotre" in str(infos["b"])
    assert not isinstance(infos[good.key], Exception)


def test_what_needs_more_than_a_gpu_has_is_left_out_before_it_runs(monkeypatch):
    """Out of shared memory or registers: on a stand-in for a GPU with 4 KB of shared memory."""
    driver = pytest.importorskip("triton.runtime").driver
    properties = lambda device: {"max_shared_mem": 4096}  # noqa: E731
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=SimpleNamespace(get_device_properties=properties)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernels = [first([T(n)], lambda b, x: b.neg(x)) for n in (64, 65, 66, 67)]
    of = lambda spills, shared: compiling.CompileInfo(0.0, 32, spills, shared)  # noqa: E731
    needs = [of(0, 4096), of(0, 4097), of(launch.MOST_SPILLS + 1, 0), compiling.CompileError("refused")]
    monkeypatch.setattr(launch, "compile_for", lambda made, *_: {k.key: n for k, n in zip(made, needs, strict=True)})
    monkeypatch.setattr(launch, "Launch", lambda candidate, capability: (candidate.key, capability))
    fits, shared, spilled, refused = launch.native(kernels, None).values()
    assert fits == (kernels[0].key, 90) and str(refused) == "refused"
    assert isinstance(shared, launch.Unfit) and isinstance(spilled, launch.Unfit)
    assert str(shared) == "it needs 4097 bytes of shared memory where 4096 are"
    assert "bytes per thread do not fit into registers" in str(spilled)


def test_numbers_to_look_up_by_may_start_at_any_element(tmp_path, monkeypatch):
    """As a column of a batch does: everything else is still read and written 16 bytes at a time."""
    driver = pytest.importorskip("triton.runtime").driver
    here = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 7}
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**here))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "0")
    rows = first([T(100, 64), T(32, e=I64)], lambda b, table, column: b.embedding(table, column))
    compiled, ran = worker.fresh, []
    monkeypatch.setattr(
        launch, "kept", lambda job: SimpleNamespace(run=lambda *a: ran.append(job), function=0, packed_metadata=0)
    )
    run = launch.Launch(rows, 90)
    table, batch, out = torch.zeros(100, 64), torch.zeros(32, 3, dtype=torch.int64), torch.zeros(32 * 64 + 1)
    for column, result in [(0, out[:-1]), (1, out[:-1]), (0, out[1:])]:
        run(table, batch[:, column], result)
    assert [job["aligned"] for job in ran] == [[0, 2], [0, 2], []] and batch[:, 1].data_ptr() % 16 == 8
    monkeypatch.setattr(driver, "_active", None)
    wide, narrow = (".v4.b32" in compiled(job).asm["ptx"] for job in ran[1:])
    assert wide and not narrow and Generated(rows, rows.functions[0]).job(90, False) == ran[2]


def test_what_was_compiled_ahead_is_there_when_it_is_built(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    sums, plain = first([T(64, 32)], lambda b, x: b.sum(x, dims=(0,))), first([T(96)], lambda b, x: b.exp(x))
    ahead = generate.Ahead()
    with ahead.compilers:
        ahead.add([sums], perhaps=True)
        begun = [ahead.add([sums]), ahead.add([sums, plain])]
        assert ahead.first_done(begun[:1]) == 0 and ahead.first_done(begun[1:]) == 0
    infos = generate.compile_for([sums, plain])
    assert [info.seconds for info in infos.values()] == [0, 0]
    (job,) = generate.jobs_of([plain], 90).values()
    true, made = worker.fresh, []
    monkeypatch.setattr(worker, "fresh", lambda job: made.append(true(job)) or made[-1])
    kernel = worker.compiled(job)  # a warm start asks Triton neither for its source nor for its name
    assert not made and kernel.asm["cubin"] == true(job).asm["cubin"] and kernel.hash == true(job).hash
    assert "ptx" not in kernel.asm and b"debug_line" not in kernel.asm["cubin"]  # (nobody reads either)
    for note in (tmp_path / "wholestep").glob("*.json"):
        note.write_text("{}")
    assert worker.compiled(job).hash == kernel.hash and len(made) == 1
    ahead = generate.Ahead()
    with ahead.compilers:  # nobody waits: what has begun is broken off, the rest does not begin
        ahead.add([first([T(128, n)], lambda b, x: b.exp(x)) for n in range(2, 40)])
        threads = ahead.compilers.threads[:]
    assert threads and not any(thread.is_alive() for thread in threads)
    assert len(ahead.compilers.answers) < 38


def test_compilers_end_when_nothing_is_to_be_done(tmp_path, monkeypatch):
    """They start before there is a job, and again for one that comes after they have ended."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "IDLE", 0.05)
    monkeypatch.setattr(
        compiling,
        "start",
        lambda folder: subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True),
    )
    answers = []
    monkeypatch.setattr(compiling, "ask", lambda worker, job: answers.append(worker) or {"error": job["name"]})
    compilers = compiling.Compilers(2, launchers=False)
    compilers.start()
    for _ in range(2):
        for thread in compilers.threads[:]:
            thread.join(20)
        assert not compilers.threads and all(worker.poll() is not None for worker in compilers.workers)
        compilers.add({key: {"name": key} for key in "ab"}, perhaps=True)
        assert compilers.wait("ab") == {key: {"error": key} for key in "ab"}
        compilers.jobs.clear()
        compilers.answers.clear()
    assert len(answers) == 4
    with compilers:  # (which ends them)
        pass


def test_what_is_waited_for_is_compiled_before_what_may_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilers = compiling.Compilers(1, launchers=False)
    monkeypatch.setattr(compilers, "employ", lambda count: None)
    compilers.add({"a": {}, "b": {}, "c": {}}, perhaps=True)
    compilers.add({"c": {}, "d": {}})
    compilers.threads.append(threading.current_thread())
    assert [compilers.take() for _ in range(3)] == ["c", "d", "a"]
    compilers.drop()
    compilers.closed = True
    assert compilers.take() is None and set(compilers.jobs) == {"a", "c", "d"}


def test_what_has_most_text_is_compiled_first(tmp_path, monkeypatch):
    """Nobody waits for it alone at the end; what launches kernels comes before all."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilers = compiling.Compilers(1)
    monkeypatch.setattr(compilers, "employ", lambda count: None)
    compilers.add({key: {"source": text, "pointers": []} for key, text in {"a": "x", "b": "xyz", "c": "xy"}.items()})
    compilers.threads.append(threading.current_thread())
    assert [compilers.take() for _ in range(4)] == ["launcher 0", "b", "c", "a"]


def test_what_launches_kernels_is_compiled_ahead(tmp_path, monkeypatch):
    """By a worker, once per number of pointers; the next process finds it without a compiler."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    source = driver.make_launcher({}, {i: "*fp32" for i in range(3)}, None)
    assert source == driver.make_launcher({}, {0: "*bf16", 1: "*i64", 2: "*i1"}, None)
    stand_in = "".join(f"int {name}(void) {{ return 0; }}\n" for name in set(re.findall(r"\bcu[A-Z]\w+(?=\()", source)))
    (tmp_path / "cuda.c").write_text(stand_in)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    for name in ("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "USUAL", (3,))
    with compiling.Compilers(1) as compilers:
        compilers.start()
        assert "error" not in compilers.wait(["launcher 3"])["launcher 3"]
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(compiling, "USUAL", (3, 17))
    with compiling.Compilers(1) as compilers:
        compilers.start()
        found = compilers.wait(["launcher 3", "launcher 17"])
    assert "error" not in found["launcher 3"] and "error" in found["launcher 17"]  # (nobody waits for those)


def test_equal_kernels_have_equal_keys():
    one, other = (first([T(64, 32)], lambda b, x: b.exp(x)) for _ in range(2))
    assert one.key == other.key and one.name == other.name
    assert first([T(64, 33)], lambda b, x: b.exp(x)).key != one.key


def test_names_are_unique():
    for types, body in (
        ([T(8192, 768)], lambda b, x: b.softmax(x, dim=1)),
        ([T(8192, 768)], lambda b, x: b.sum(x, dims=(0,))),
        ([T(8192, 768)], lambda b, x: b.transpose(x, order=(1, 0))),
    ):
        kernel = of_step(types, body)
        names = [c.name for c in generate.candidates(kernel, specs_of(kernel))]
        assert len(set(names)) == len(names) and 1 < len(names) <= 6


def test_each_large_tensor_is_read_once():
    """A row that fits is held: its loads appear once in the source."""
    source = first([T(8192, 768)], lambda b, x: b.softmax(x, dim=1)).source
    assert source.count("tl.load") == 1


def test_channels_last_is_one_flat_run():
    kernel = of_step([T(8, 64, 14, 14), T(8, 64, 14, 14)], lambda b, x, y: b.add(x, y))
    turned = {i: CHANNELS_LAST for i in range(3)}
    assert generate.candidates(kernel, specs_of(kernel, turned))[0].source.count("%") == 0
    assert generate.candidates(kernel, specs_of(kernel, {0: CHANNELS_LAST}))[0].name.startswith("tile")


def test_guesses_are_what_was_fastest():
    """On an H200 (bench/results/LOG.md): of many short sums side by side 128 at a time, nothing read ahead where it is
    worked out what is read, and blocks of 1024 numbers."""

    def spread(b, x):
        return b.sum(b.slice_grad(x, dim=0, start=0, end=8192, stride=2, size=8192), dims=(0,))

    rows, images = [T(4096, 256, e=BF16)], [T(256, 196, 640, e=BF16)]
    assert first(rows, lambda b, x: b.sum(x, dims=(0,))).name == "sum 32x64 p64 w4 s3"
    assert first(images, lambda b, x: b.sum(x, dims=(1,))).name == "sum 16x128 p1 w4 s3"
    assert first(rows, spread).name == "sum 32x64 p128 w4"
    assert first([T(1 << 20, e=BF16)], lambda b, x: b.exp(x)).name == "flat 1024 w4"
    types = [T(1024, 768), T(1024, 768), T(1024, 1), T(1024, 1), T(768), T(1024, 768)]
    assert first(types, norm_grad).name == "row x1 1024 p528 w4"  # few rows for each to add up: fewer programs
    for channels, high in ((256, 4), (1024, 8)):  # so few programs that half a word of 16 bytes is better
        types = [T(8, channels, 14, 14, e=BF16), *[T(channels)] * 4]
        body = lambda b, x, w, c, m, v: b.batch_norm(x, w, c, m, v, momentum=0.1, eps=1e-5)[0]  # noqa: E731
        assert first(types, body, {0: CHANNELS_LAST, 5: CHANNELS_LAST}).name.startswith(f"row x{high} ")


def test_what_large_tensors_have_not_is_walked_inside():
    """Labels are read once for all classes, which come as they lie; pixels of a cell are added up in a thread."""
    kernel = of_step(ENLARGED, enlarged_loss((8, 8)))
    family = Family(kernel, specs_of(kernel, {0: CHANNELS_LAST}))
    assert [d.size for d in family.inside] == [16, 61, 61, 21]
    assert generate.candidates(kernel, specs_of(kernel, {0: CHANNELS_LAST}))[0].name == "sum 16x64 p1 w4"


def test_what_is_looked_up_many_times_does_not_say_the_order():
    """Rows of classes that are computed from few pixels: their order is that of labels."""
    enlarged = lambda b, x, t: b.cross_entropy(b.upsample(b.cast_to(x, F32), factors=(8, 8)), t)  # noqa: E731
    kernel = of_step(ENLARGED[:2], enlarged)
    family = Family(kernel, specs_of(kernel, {0: CHANNELS_LAST}))
    assert [d.size for d in family.inside] == [21] and [d.size for d in family.outside] == [16, 480, 480]
    # a thread has a row by itself; not where rows have numbers of their own
    assert generate.candidates(kernel, specs_of(kernel, {0: CHANNELS_LAST}))[0].name.startswith("row x256 loop 1 ")
    plain = of_step([T(16, 21, 480, 480), ENLARGED[1]], lambda b, x, t: b.cross_entropy(x, t))
    assert "loop 1 " not in " ".join(c.name for c in generate.candidates(plain, specs_of(plain)))


@pytest.mark.parametrize("points, wide", [(2**20, False), (2**31, True)])
def test_indices_are_as_wide_as_they_must_be(points, wide):
    kernel = of_step([T(points, e=BF16)], lambda b, x: b.neg(x))
    assert ("int64" in generate.candidates(kernel, specs_of(kernel))[0].source) is wide


def test_reasons():
    f8 = ScalarType("f8E4M3FN")
    kernel = of_step([T(4, e=f8)], lambda b, x: b.cast(x, dtype=F32))
    assert "f8E4M3FN" in generate.why_not(kernel, specs_of(kernel))
    kernel = of_step([T(2, 2**21)], lambda b, x: b.softmax(x, dim=1))
    assert "too long" in generate.why_not(kernel, specs_of(kernel))


def test_kernels_of_different_bodies_are_not_batched():
    one, other = (of_step([T(64)], body) for body in (lambda b, x: b.exp(x), lambda b, x: b.neg(x)))
    with pytest.raises(InputError, match="same body"):
        generate.batch([(one, specs_of(one)), (other, specs_of(other))])
    rows = case([T(4, 6)], lambda b, x: b.softmax(x, dim=1)).kernel
    assert generate.batch_key(rows, specs_of(rows)) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_there_is_a_reason():
    pytest.importorskip("triton")
    if generate.interpreting():
        pytest.skip("the interpreter needs no GPU")
    candidate = first([T(64)], lambda b, x: b.neg(x))
    assert "GPU" in str(generate.build([candidate])[candidate.key])
