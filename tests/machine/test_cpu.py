"""AMX announced but not granted: the decision with injected answers, and the real thing in a process of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from wholestep.machine import cpu
from wholestep.machine.cpu import (
    ISA_CAP,
    ISA_VARIABLE,
    RATE_FLAGS,
    Amx,
    cpu_field,
    cpu_flags,
    protect,
    rate_flags,
    settle,
    usable,
)

WITH_AMX = frozenset({"fpu", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "amx_int8"})


class Kernel:
    """Answers a request with a set errno, and counts how often it was asked."""

    def __init__(self, answer: int):
        self.answer, self.asked = answer, 0

    def __call__(self) -> int:
        self.asked += 1
        return self.answer


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "restored afterwards")
    monkeypatch.delenv(ISA_VARIABLE)
    protect.cache_clear()
    yield
    protect.cache_clear()


@pytest.mark.parametrize("flags", ["", "fpu avx2 avx512_bf16", "amx_tile", "amx_bf16", "amx_tile amx_int8"])
def test_without_bf16_tiles_the_kernel_is_not_asked(flags):
    kernel, environ = Kernel(errno.EPERM), {}
    status = settle(frozenset(flags.split()), kernel, environ)
    assert status == Amx(announced=False)
    assert status.safe and "not announced" in status.verdict
    assert kernel.asked == 0 and environ == {}


def test_granted_leaves_the_environment_alone():
    kernel, environ = Kernel(0), {}
    status = settle(WITH_AMX, kernel, environ)
    assert status == Amx(announced=True, granted=True)
    assert status.safe and "granted" in status.verdict
    assert kernel.asked == 1 and environ == {}


def test_instructions_that_change_rates_are_those_that_may_be_used():
    assert usable(WITH_AMX, Amx(True, True)) == ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    assert usable(WITH_AMX, Amx(True, False, ISA_CAP, True, errno.EPERM)) == ("avx2", "avx512f", "avx512_bf16")
    assert usable(frozenset({"fpu", "asimd", "bf16"}), Amx(False)) == ("bf16",)
    assert set(rate_flags()) <= set(RATE_FLAGS)


@pytest.mark.parametrize("answer", [errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_refused_caps_onednn_and_says_so(answer):
    environ: dict[str, str] = {}
    status = settle(WITH_AMX, Kernel(answer), environ)
    assert environ == {ISA_VARIABLE: ISA_CAP}
    assert status == Amx(announced=True, granted=False, cap=ISA_CAP, capped_here=True, error=answer)
    assert status.safe
    assert os.strerror(answer) in status.verdict and f"{ISA_VARIABLE}={ISA_CAP}" in status.verdict


@pytest.mark.parametrize("name", [ISA_VARIABLE, "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("value", "safe"),
    [
        ("AVX2", True),
        ("AVX512_CORE_FP16", True),
        ("AVX512_CORE_AMX", False),
        ("avx512_core_amx_fp16", False),
        ("ALL", False),
    ],
)
def test_a_cap_of_the_users_is_kept_and_judged(name, value, safe):
    environ = {name: value}
    status = settle(WITH_AMX, Kernel(errno.EPERM), environ)
    assert environ == {name: value}
    assert status.cap == value and not status.capped_here and status.safe is safe
    assert (f"unset {ISA_VARIABLE}" in status.verdict) is not safe


def test_an_empty_variable_is_no_cap():
    environ = {ISA_VARIABLE: ""}
    assert settle(WITH_AMX, Kernel(errno.EPERM), environ).capped_here
    assert environ == {ISA_VARIABLE: ISA_CAP}


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_elsewhere_nothing_is_read_or_asked(monkeypatch, system, machine):
    monkeypatch.setattr(cpu.platform, "system", lambda: system)
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: pytest.fail("flags were read"))
    monkeypatch.setattr(cpu, "request_amx", lambda: pytest.fail("the kernel was asked"))
    assert protect() == Amx(announced=False)


def test_protect_is_idempotent_and_cheap(monkeypatch):
    kernel = Kernel(errno.EPERM)
    monkeypatch.setattr(cpu.platform, "system", lambda: "Linux")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "cpu_flags", lambda: WITH_AMX)
    monkeypatch.setattr(cpu, "request_amx", kernel)
    first = protect()
    start = time.perf_counter()
    assert all(protect() is first for _ in range(1000))
    assert time.perf_counter() - start < 0.1
    assert kernel.asked == 1 and first.capped_here and os.environ[ISA_VARIABLE] == ISA_CAP


def test_cpuinfo_is_read_from_the_first_processor(tmp_path):
    first = "processor\t: 0\nmodel name\t: Some CPU @ 2: fast\nflags\t\t: fpu amx_tile amx_bf16\n"
    second = "processor\t: 1\nflags\t\t: other\n"
    path = tmp_path / "cpuinfo"
    path.write_text(f"{first}\n{second}")
    assert cpu_flags(str(path)) == {"fpu", "amx_tile", "amx_bf16"}
    assert cpu_field("model name", str(path)) == "Some CPU @ 2: fast"
    assert cpu_field("Features", str(path)) == ""
    assert cpu_flags(str(tmp_path / "absent")) == frozenset()


def _run(code: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.endswith("_MAX_CPU_ISA")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environ
    )


def test_bf16_survives_on_this_machine():
    """For real, whatever this machine is; where AMX is announced and refused, this is what `protect` is for."""
    done = _run(
        "from wholestep.machine.cpu import protect\n"
        "status = protect()\n"
        "assert status.safe, status\n"
        "import torch\n"
        "a = torch.ones(256, 256, dtype=torch.bfloat16)\n"
        "assert float((a @ a)[0, 0]) == 256\n"
        "x, w = torch.ones(2, 32, 16, 16, dtype=torch.bfloat16), torch.ones(32, 32, 3, 3, dtype=torch.bfloat16)\n"
        "assert float(torch.nn.functional.conv2d(x, w)[0, 0, 0, 0]) == 288\n"
        "print('alive')\n"
    )
    assert done.returncode == 0 and done.stdout.strip() == "alive", (done.returncode, done.stderr)


def test_protecting_imports_no_torch():
    done = _run(
        "import sys; from wholestep.machine.cpu import request_amx; request_amx(); print('torch' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    # The package itself may import torch; the room must not: run it as it would be without the rest.
    alone = _run(
        "import sys, types, pathlib\n"
        f"root = pathlib.Path({str(cpu.__file__)!r}).parents[1]\n"
        "package = types.ModuleType('wholestep'); package.__path__ = [str(root)]; sys.modules['wholestep'] = package\n"
        "import wholestep.machine; wholestep.machine.protect(); print('torch' in sys.modules)\n"
    )
    assert alone.returncode == 0 and alone.stdout.strip() == "False", alone.stderr
