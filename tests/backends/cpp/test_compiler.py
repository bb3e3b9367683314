"""Compilers that are missing, fail or hang; objects that are damaged, shared by processes or not ours."""

from __future__ import annotations

import os
import textwrap
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import warm
from wholestep.backends import cpp
from wholestep.backends.cpp import compiler as compiling
from wholestep.ir.types import F32, I64, ScalarType, TensorType

from .kernels import Case, apply, step, tensor

needs_compiler = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())


def case(fn: str = "exp", scale: float = 2.0) -> Case:
    return step([tensor(40)], lambda b, x: b.mul(getattr(b, fn)(x), scale))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch):
    """The sources that were compiled."""
    found = []
    real = compiling.Compiler.compile

    def watch(self, source, timeout=compiling.TIMEOUT):
        found.append(source)
        return real(self, source, timeout)

    monkeypatch.setattr(compiling.Compiler, "compile", watch)
    return found


def candidates_of(*cases: Case) -> list[cpp.Candidate]:
    return [cpp.candidates(c.function, c.specs)[0] for c in cases]


def check(kernel, fn=torch.exp, scale=2.0):
    assert not isinstance(kernel, Exception), kernel
    x, y = torch.randn(40), torch.zeros(40)
    kernel(x, y)
    torch.testing.assert_close(y, fn(x) * scale)


def script(folder: Path, text: str, name: str = "g++") -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_a_user_without_a_home_builds_for_this_process(monkeypatch):
    for name in ("WHOLESTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # (by which pathlib finds that there is none)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objects = compiling.kept()
    assert objects.write("so", "0" * 64, b"x").is_file()


# ---- no compiler, and bad ones ---------------------------------------------------------------------------------------


def test_no_compiler(monkeypatch, tmp_path):
    (candidate,) = candidates_of(case())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "g++ is not installed" in cpp.missing() and "ATen" in cpp.missing() and "\n" not in cpp.missing()
    assert "clang++ is not installed" in cpp.why_not(case().function, case().specs)
    built = cpp.build([candidate])
    assert isinstance(built[candidate.key], cpp.CompilerError) and "g++" in str(built[candidate.key])


def test_cxx_names_nothing(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX=no-such-compiler is no program" in cpp.missing()


def test_compiler_fails(monkeypatch, tmp_path, cache):
    broken = script(
        tmp_path, 'case "$1" in --version) echo broken 1.0;; *) echo "x.cpp:1: error: no luck"; exit 1;; esac\n'
    )
    monkeypatch.setenv("CXX", str(broken))
    assert "no luck" in cpp.missing()
    assert "no luck" in cpp.why_not(case().function, case().specs)


@needs_compiler
def test_compiler_hangs(tmp_path):
    slow = script(tmp_path, "sleep 60 & wait\n")
    with pytest.raises(cpp.CompilerError, match="did not finish within"):
        compiling.run_compiler([str(slow)], timeout=0.2)


def test_another_compiler_is_used_where_the_first_is_missing(monkeypatch, tmp_path, cache):
    """A stand-in that gives its source as the object: nothing of it is loaded."""
    script(
        tmp_path,
        'if [ "$1" = --version ]; then echo "stand-in"; exit; fi\n'
        'while [ "$1" != -o ]; do shift; done\n'
        'while read -r line; do echo "$line"; done < "$3" > "$2"\n',
        name="clang++",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = compiling.working_compiler()
    assert not isinstance(found, str) and Path(found.command).name == "clang++", found
    assert cpp.missing() == ""


@needs_compiler
def test_one_broken_kernel_does_not_stop_others(cache):
    good, other = candidates_of(case(), case("tanh"))
    bad = cpp.Candidate("bad", (), "0" * 64, good.source.replace("exp_", "no_such_function"))
    built = cpp.build([good, bad, other])
    check(built[good.key])
    check(built[other.key], torch.tanh)
    assert isinstance(built[bad.key], cpp.CompilerError) and "no_such_function" in str(built[bad.key])


# ---- objects ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_long_kernels_are_units_by_themselves():
    """They compile while the others do."""
    long = [(f"long_{i}", "x" * (compiling.LONG + 1)) for i in range(2)]
    short = [(f"short_{i}", "x" * 100) for i in range(5)]
    units = compiling.split([*short, *long], 2)
    assert units[:2] == [[kernel] for kernel in long] and len(units) == 4
    assert sorted(kernel for unit in units[2:] for kernel in unit) == short
    assert compiling.split(long, 2) == [[kernel] for kernel in long] and compiling.split([], 2) == []


def test_built_once(cache, compiled):
    first, second = candidates_of(case(), case("tanh"))
    again = candidates_of(case())[0]
    assert first.key == again.key and first.name == again.name and first.key != second.key
    check(cpp.build([first, again, second])[first.key])
    count = len(compiled)
    reported = []
    built = cpp.build([second, first], lambda done, total: reported.append((done, total)))
    check(built[second.key], torch.tanh)
    check(built[first.key])
    assert len(compiled) == count and reported == [(2, 2)]


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "record"])
def test_a_damaged_object_is_built_again(cache, compiled, damage):
    (candidate,) = candidates_of(case())
    check(cpp.build([candidate])[candidate.key])
    del compiled[:]
    ending = "json" if damage == "record" else "so"
    objects = [p for p in cache.rglob(f"*.{ending}") if b"wholestep_probe" not in p.read_bytes()]
    assert len(objects) == 1
    data = objects[0].read_bytes()
    if damage == "gone":
        objects[0].unlink()
    else:
        objects[0].write_bytes(data[: len(data) // 2] if damage == "truncated" else data[:20] + b"\0\1\2" + data[23:])
    with pytest.warns(UserWarning, match="damaged") if damage != "gone" else nullcontext():
        built = cpp.build([candidate])
    check(built[candidate.key])
    assert len(compiled) == (0 if damage == "record" else 1)


@needs_compiler
def test_another_processor_has_objects_of_its_own(cache, compiled, monkeypatch):
    """A cache in a home folder that machines share: what one has compiled for itself may not run on another."""
    (candidate,) = candidates_of(case())
    own = compiling.working_compiler()
    assert isinstance(own, compiling.Compiler)
    for processor, count in (("one", 1), ("another", 2), ("one", 2)):
        monkeypatch.setattr(compiling, "processor", lambda name=processor: name)
        there = replace(own, identity=compiling.identity(own.command))
        monkeypatch.setattr(cpp, "working_compiler", lambda there=there: there)
        check(cpp.build([candidate])[candidate.key])
        assert len([source for source in compiled if source != compiling.PROBE]) == count


@needs_compiler
def test_a_folder_that_others_can_write_is_not_used(cache, compiled):
    (candidate,) = candidates_of(case())
    cpp.build([candidate])
    del compiled[:]
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by other users"):
        check(cpp.build([candidate])[candidate.key])
    assert len(compiled) == 1


@needs_compiler
def test_two_processes_build_at_once(cache):
    program = textwrap.dedent("""
        import torch
        from tests.backends.cpp.test_compiler import candidates_of, case, check, cpp
        found = candidates_of(case(), case("tanh"), case("erf"))
        built = cpp.build(found)
        check(built[found[0].key])
        check(built[found[2].key], torch.erf)
        print("right")
    """)
    done = warm.run_at_once(2, ["-c", program], os.environ | {"WHOLESTEP_CACHE": str(cache)})
    assert [d.stdout.strip() for d in done] == ["right", "right"], done


# ---- what is asked ---------------------------------------------------------------------------------------------------


@needs_compiler
def test_why_not():
    half = ScalarType("f8E5M2")
    odd = apply(["cast"], [torch.zeros(4)], [half], [F32])
    assert "f8E5M2" in cpp.why_not(odd.function, odd.specs)
    plain = case()
    specs = plain.specs
    specs[1] = type(specs[1])(specs[1].shape, (0,), specs[1].dtype)
    assert "several elements at one place" in cpp.why_not(plain.function, specs)
    mixed = step([tensor(4, 5)], lambda b, x: b.add(b.softmax(x, dim=0), b.softmax(x, dim=1)))
    assert "rows along different dimensions" in cpp.why_not(mixed.function, mixed.specs)


@needs_compiler
def test_candidates_differ_in_name_and_fit_their_kernel():
    for made in (
        step([tensor(100, 300)], lambda b, x: b.softmax(x, dim=1)),
        step([tensor(100, 300), tensor(100, 300)], lambda b, x, y: b.add(x, y), {0: (1, 100)}),
        step([tensor(9000, 300)], lambda b, x: b.sum(x, dims=(0,))),
    ):
        found = cpp.candidates(made.function, made.specs)
        assert 1 <= len(found) <= 6 and len({c.name for c in found}) == len({c.key for c in found}) == len(found)
        assert [c.name for c in found] == [c.name for c in cpp.candidates(made.function, made.specs)]


@needs_compiler
def test_results_do_not_depend_on_threads(cache):
    layer_norm = [tensor(700, 96), tensor(700, 96), tensor(700, 1), tensor(700, 1), tensor(96)]
    cases = [
        step([tensor(300_007)], lambda b, x: b.sum(x, dims=(0,))),
        step([tensor(9000, 60)], lambda b, x: b.sum(x, dims=(0,))),
        step(layer_norm, lambda b, dy, x, m, r, w: b.layer_norm_grad(dy, x, m, r, w)),
        step([tensor(200, 500)], lambda b, x: b.softmax(x, dim=1)),
    ]
    found = [(c, k) for c in cases for k in cpp.candidates(c.function, c.specs)]
    built = cpp.build([k for _, k in found])
    threads = torch.get_num_threads()
    for made, candidate in found:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ins, outs = made.arguments()
            built[candidate.key](*ins, *outs, *(torch.empty(s.shape, dtype=s.dtype) for s in candidate.scratch))
            results.append([o.clone() for o in outs])
        torch.set_num_threads(threads)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), candidate.name


@needs_compiler
def test_in_place(cache):
    """An output may take the memory of an input that is read at the same places."""
    softmax = step([tensor(30, 100)], lambda b, x: b.softmax(x, dim=1))
    scaled = step([tensor(3000)], lambda b, x: b.exp(x))
    found = [cpp.candidates(c.function, c.specs)[0] for c in (softmax, scaled)]
    built = cpp.build(found)
    x = torch.randn(30, 100)
    want = x.softmax(1)
    built[found[0].key](x, x)
    torch.testing.assert_close(x, want)
    y = torch.randn(3000)
    want = y.exp()
    built[found[1].key](y, y)
    torch.testing.assert_close(y, want)


@needs_compiler
def test_random_numbers_are_those_of_torch_ops(cache):
    kind = TensorType((50, 33), F32)
    made = step([tensor(3, e=I64)], lambda b, k: b.random(k, distribution="uniform", stream=9, type=kind))
    (candidate,) = candidates_of(made)
    kernel = cpp.build([candidate])[candidate.key]
    key = torch.tensor([0x123456789ABCDEF, (5 << 32) + 77, 3])
    got, want = torch.zeros(50, 33), torch.zeros(50, 33)
    kernel(key, got)
    torch.ops.wholestep.random_(want, key, "uniform", 9)
    assert torch.equal(got, want)
