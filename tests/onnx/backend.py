"""The official ONNX backend tests (`onnx.backend.test`) against the importer: every case, judged one by one.

A case passes, is unsupported (an import error that says so), or is one of what must never be: wrong (a number that is
not the expected one), refused (a valid graph called invalid) or crashed. `python -m tests.onnx.backend --write` runs
all cases and writes the counts and every failure with its reason into docs/onnx.md.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper

from wholestep.onnx import from_onnx
from wholestep.onnx.dtypes import TORCH_OWN, dtype_of
from wholestep.onnx.errors import DataDependentError, OnnxUnsupportedError

KINDS = ("node", "pytorch-converted", "pytorch-operator", "simple")
#: modules of node cases that take most of the time to make: they pool volumes in pure Python
SLOW = ("averagepool", "lppool", "maxpool")
#: cases that no evaluator can be held to: their outputs are random, and the data only an example of them
RANDOM = ("test_bernoulli",)
DROPPED = (
    "test_training_dropout", "test_training_dropout_default", "test_training_dropout_mask",
    "test_training_dropout_default_mask",
)  # fmt: skip
#: cases whose expected numbers are themselves off by more than the tolerance: 2e-7 where the exact result is 0
ROUNDED = {"test_dft_inverse": 1e-6, "test_dft_inverse_opset19": 1e-6}
PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
BEGIN, END = "<!-- backend tests: begin -->", "<!-- backend tests: end -->"


@dataclass(frozen=True)
class Case:
    """One official test: a model, and inputs with expected outputs."""

    name: str
    kind: str
    model: Any
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    name: str
    kind: str
    verdict: str
    reason: str = ""


# ---- cases -----------------------------------------------------------------------------------------------------------


def cases(kind: str, slow: bool = True) -> Iterator[Case]:
    """The cases of one set, by name; without `slow` those of pooling are left out."""
    listed = node_cases(slow) if kind == "node" else disk_cases(kind)
    return iter(sorted(listed, key=lambda case: case.name))


def node_cases(slow: bool) -> Iterator[Case]:
    import onnx.backend.test.case.node as node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in pkgutil.walk_packages(node.__path__, f"{node.__name__}."):
            if slow or found.name.rpartition(".")[2] not in SLOW:
                importlib.import_module(found.name)
    for case in node._NodeTestCases:
        data = [([as_array(x) for x in given], [as_array(x) for x in wanted]) for given, wanted in case.data_sets]
        yield Case(case.name, "node", case.model, data, case.rtol, case.atol)


def as_array(x: Any) -> Any:
    """Some cases give their tensors as messages."""
    return numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def disk_cases(kind: str) -> Iterator[Case]:
    from onnx.backend.test.loader import load_model_tests

    for case in load_model_tests(kind=kind):
        folder = Path(case.model_dir)
        model = onnx.load(folder / "model.onnx")
        weights = {t.name for t in model.graph.initializer}
        inputs = [i.type for i in model.graph.input if i.name not in weights]
        outputs = [o.type for o in model.graph.output]
        data = []
        for part in sorted(folder.glob("test_data_set_*")):
            given = sorted(part.glob("input_*.pb"), key=number)
            wanted = sorted(part.glob("output_*.pb"), key=number)
            if len(given) > len(inputs):  # old files list initializers among the inputs
                inputs = [i.type for i in model.graph.input]
            data.append((
                [read(path, type) for path, type in zip(given, inputs, strict=False)],
                [read(path, type) for path, type in zip(wanted, outputs, strict=True)],
            ))  # fmt: skip
        yield Case(case.name, kind, model, data, case.rtol, case.atol)


def number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def read(path: Path, type: Any) -> Any:
    """A value from its file: array, list of arrays or None."""
    content = path.read_bytes()
    if type.WhichOneof("value") == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if type.WhichOneof("value") == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(onnx.TensorProto.FromString(content))


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(case: Case) -> Outcome:
    """Runs one case by the importer and the reference executor."""
    try:
        for given, wanted in case.data:
            module = from_onnx(case.model, mode="as written", frozen_inputs=True)
            types = {i.name: i.type for i in case.model.graph.input}
            listed = [types[n] for n in module.input_names]
            with torch.no_grad():
                got = module(*(to_torch(x, t) for x, t in zip(given, listed, strict=False)))
            parts = list(got) if len(case.model.graph.output) > 1 else [got]
            outputs = [to_numpy(p, o.type) for p, o in zip(parts, case.model.graph.output, strict=True)]
            problem = difference(outputs, wanted, case)
            if problem:
                return Outcome(case.name, case.kind, "wrong", problem)
    except (OnnxUnsupportedError, DataDependentError) as error:
        return Outcome(case.name, case.kind, "unsupported", str(error).splitlines()[0])
    except Exception as error:
        verdict = "refused" if type(error).__module__.startswith("wholestep") else "crashed"
        text = str(error).splitlines() or [""]
        return Outcome(case.name, case.kind, verdict, f"{type(error).__name__}: {text[0]}")
    return Outcome(case.name, case.kind, "pass")


def judge_reference(case: Case) -> Outcome:
    """Runs one case by onnx's own evaluator in Python."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = ReferenceEvaluator(case.model)
            for given, wanted in case.data:
                outputs = evaluator.run(None, dict(zip(evaluator.input_names, given, strict=False)))
                problem = difference(outputs, wanted, case)
                if problem:
                    return Outcome(case.name, case.kind, "wrong", problem)
    except Exception as error:
        return Outcome(case.name, case.kind, "crashed", type(error).__name__)
    return Outcome(case.name, case.kind, "pass")


def difference(outputs: Sequence[Any], wanted: Sequence[Any], case: Case) -> str:
    """What onnx's own comparison says of outputs; empty where they agree."""
    from onnx.backend.test.runner import Runner

    try:
        ours, theirs = flat(outputs, wanted), flat(wanted, wanted)
        if case.name.startswith(RANDOM) or case.name in DROPPED:
            return shapes_differ(ours, theirs)
        rtol = case.rtol
        if any(x.dtype == np.float16 for x in theirs):
            rtol = max(rtol, 2**-9)  # two units in the last place, as onnx allows bfloat16
        atol = max(case.atol, ROUNDED.get(case.name, 0.0))
        Runner.assert_similar_outputs(theirs, ours, rtol, atol, case.name)
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return "; ".join(lines[:3]) or "different"
    return ""


def flat(values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Arrays of nested lists one after the other; the nesting must be that of `like`."""
    assert len(values) == len(like), f"{len(values)} values instead of {len(like)}"
    out: list[Any] = []
    for value, other in zip(values, like, strict=True):
        assert isinstance(value, list | tuple) == isinstance(other, list | tuple), "a list instead of an array"
        assert (value is None) == (other is None), "a value that is absent"
        if isinstance(value, list | tuple):
            out += flat(value, other)
        elif value is not None:
            out.append(np.asarray(value))
    return out


def shapes_differ(outputs: Sequence[Any], wanted: Sequence[Any]) -> str:
    for out, ref in zip(outputs, wanted, strict=True):
        if out.shape != ref.shape or out.dtype != ref.dtype:
            return f"{out.dtype} {out.shape} instead of {ref.dtype} {ref.shape}"
    return ""


def to_torch(x: Any, type: Any) -> Any:
    """An input as the module takes it; types that torch does not have in the type that carries them."""
    kind = type.WhichOneof("value")
    if x is None:
        return None
    if kind == "optional_type":
        return to_torch(x, type.optional_type.elem_type)
    if kind == "sequence_type":
        return [to_torch(part, type.sequence_type.elem_type) for part in x]
    array = np.asarray(x)
    dtype = dtype_of(type.tensor_type.elem_type)
    if dtype is None:  # text
        return array
    if array.dtype.type.__module__ == "ml_dtypes" or array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32 if dtype.is_floating_point else np.int8)
    return torch.from_numpy(np.array(array)).to(dtype)


def to_numpy(x: Any, type: Any) -> Any:
    """An output in the type that the graph declares; an AssertionError where the module gave another."""
    kind = type.WhichOneof("value")
    if x is None:
        return None
    if kind == "optional_type":
        return to_numpy(x, type.optional_type.elem_type)
    if kind == "sequence_type":
        return [to_numpy(part, type.sequence_type.elem_type) for part in x]
    declared = type.tensor_type.elem_type
    if declared == onnx.TensorProto.STRING:
        assert isinstance(x, np.ndarray) and all(isinstance(part, str) for part in x.flat), "no text"
        return x
    assert x.dtype in (dtype_of(declared), TORCH_OWN.get(declared)), f"{x.dtype} for type {declared}"
    own = onnx.helper.tensor_dtype_to_np_dtype(declared)
    wide = x if x.dtype is dtype_of(declared) and x.dtype is not torch.bfloat16 else x.to(torch.float32)
    with np.errstate(invalid="ignore"):  # not a number stays that
        return wide.numpy().astype(own)


def run(kinds: Sequence[str] = KINDS, slow: bool = True, judge: Any = judge) -> list[Outcome]:
    """The outcome of every case."""
    return [judge(case) for kind in kinds for case in cases(kind, slow)]


# ---- the page --------------------------------------------------------------------------------------------------------


def report(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> str:
    """The generated part of docs/onnx.md."""
    theirs = Counter(o.kind for o in reference if o.verdict == "pass")
    lines = [
        f"Cases of onnx {onnx.__version__}, run by the reference executor and compared as onnx compares them, with two "
        "exceptions: float16 may be off by two units in the last place, as bfloat16 may, and around zero "
        f"{' and '.join(ROUNDED)} may be off by 1e-6 (the expected numbers are). {len(DROPPED)} cases of dropout and "
        "those of Bernoulli are random: they pass where shapes and types are right.",
        "",
        "| set | cases | pass | unsupported | wrong, refused or crashed | ReferenceEvaluator passes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        of = Counter(o.verdict for o in outcomes if o.kind == kind)
        total, bad = sum(of.values()), of["wrong"] + of["refused"] + of["crashed"]
        lines.append(f"| {kind} | {total} | {of['pass']} | {of['unsupported']} | {bad} | {theirs[kind]} |")
    for kind in KINDS:
        by_reason: dict[str, list[str]] = {}
        for o in outcomes:
            if o.kind == kind and o.verdict != "pass":
                reason = re.sub(r" node (\d+|'[^']*')( \(which gives '[^']*'\))?:", ":", o.reason)
                by_reason.setdefault(reason, []).append(o.name)
        if by_reason:
            lines += ["", f"### What does not pass: {kind}", "", "| reason | cases |", "|---|---|"]
        for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
            lines.append(f"| {reason.replace('|', '/')} | {', '.join(names)} |")
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Puts the generated part between its markers."""
    whole = page.read_text()
    before, rest = whole.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the counts into docs/onnx.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = run()
    for o in outcomes:
        if o.verdict not in ("pass", "unsupported"):
            print(o.verdict, o.name, o.reason)
    text = report(outcomes, run(judge=judge_reference))
    if arguments.write:
        write(PAGE, text)
    print("\n".join(text.splitlines()[:8]))


if __name__ == "__main__":
    main()
