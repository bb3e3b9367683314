"""Golden files, judged by us, by stock mlir-opt 22 with IRDL generated from our declarations, and by xDSL's parser."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from wholestep import dialects, ir
from wholestep.dialects import reference
from wholestep.errors import ParseError, VerifyError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GOOD = sorted(GOLDEN.glob("*.mlir"))
BAD = sorted((GOLDEN / "bad").glob("*.mlir"))


@pytest.fixture(scope="session")
def irdl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with the IRDL of every dialect of ours."""
    path = tmp_path_factory.mktemp("irdl") / "all.irdl.mlir"
    path.write_text("".join(text for name, text in reference.pages().items() if name.endswith(".irdl.mlir")))
    return path


def judge(mlir_opt: str, irdl_file: Path, file: Path) -> subprocess.CompletedProcess[str]:
    command = [mlir_opt, f"--irdl-file={irdl_file}", "--mlir-print-op-generic", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_every_dialect_has_a_golden_file() -> None:
    assert {dialect.name for dialect in dialects.all_dialects()} <= {path.stem for path in GOOD}
    assert len(BAD) >= 20


@pytest.mark.parametrize("file", GOOD, ids=lambda path: path.stem)
def test_good_files_are_ours_and_exact(file: Path) -> None:
    text = file.read_text()
    root = ir.parse(text, dialects.context(), file.name, verify=True)
    assert ir.print_module(root, locations=True) == text


@pytest.mark.parametrize("file", GOOD, ids=lambda path: path.stem)
def test_mlir_opt_accepts_and_hands_back_the_same_program(file: Path, mlir_opt: str, irdl_file: Path) -> None:
    verdict = judge(mlir_opt, irdl_file, file)
    assert verdict.returncode == 0, verdict.stderr
    root = ir.parse(file.read_text(), dialects.context())
    again = ir.parse(verdict.stdout, dialects.context(), "mlir-opt", verify=True)
    assert ir.structural_hash(again) == ir.structural_hash(root)


@pytest.mark.parametrize("file", GOOD, ids=lambda path: path.stem)
def test_xdsl_accepts(file: Path) -> None:
    pytest.importorskip("xdsl")
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.dialects.func import Func
    from xdsl.parser import Parser

    context = Context(allow_unregistered=True)
    context.load_dialect(Builtin)
    context.load_dialect(Func)
    root = Parser(context, file.read_text()).parse_module()
    root.verify()
    ours = ir.parse(file.read_text(), dialects.context())
    assert sum(1 for _ in root.walk()) == sum(1 for _ in ours.walk())


@pytest.mark.parametrize("file", BAD, ids=lambda path: path.stem)
def test_we_refuse_bad_files_and_say_why(file: Path) -> None:
    text = file.read_text()
    expected = text.splitlines()[0].removeprefix("// expected: ")
    with pytest.raises((ParseError, VerifyError)) as caught:
        ir.parse(text, dialects.context(), file.name, verify=True)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"{file.name}:") and str(caught.value).endswith("^")


@pytest.mark.parametrize("file", BAD, ids=lambda path: path.stem)
def test_mlir_opt_refuses_bad_files(file: Path, mlir_opt: str, irdl_file: Path) -> None:
    verdict = judge(mlir_opt, irdl_file, file)
    assert verdict.returncode != 0
    assert "error:" in verdict.stderr
