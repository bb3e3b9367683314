"""The networks of the benchmark are those that their names stand for, and the compiler knows none of them by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.networks import TWELVE, build
from wholestep.bench import workload
from wholestep.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
#: of torchvision (without FCN's second head), transformers, and the papers of MLP-Mixer and TinyLlama
PARAMETERS = {
    "gpt2": 124_439_808,
    "bert_large": 335_174_458,
    "llama": 1_100_048_384,
    "vit": 86_567_656,
    "resnet50": 25_557_032,
    "wide_resnet50_2": 68_883_240,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "mlp_mixer": 59_880_472,
    "fcn_resnet50": 32_957_013,
}


def test_networks_have_the_parameters_of_their_originals() -> None:
    pytest.importorskip("transformers")
    models = {name: build(name, "full", "meta").model for name in PARAMETERS}
    assert {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()} == PARAMETERS


def test_torch_compile_gets_one_graph_and_no_mask() -> None:
    """Whatever eager training is spared must not be left to others: flash attention takes no mask. Two steps."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "tests.bench.traced_networks"]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    causal, free = [[[False, True]]], [[[False, False]]]
    transformers = {"gpt2": causal, "bert_large": free, "llama": causal, "vit": free}
    assert json.loads(said) == transformers | {"resnet50": [[]]}


def test_no_part_of_the_compiler_names_a_network() -> None:
    words = {word for name in TWELVE for word in re.findall("[a-z]{3,}", name)} - {"wide", "large", "mlp"}
    named = re.compile(rf"(?<![a-z])({'|'.join(sorted(words))})(?![a-z])", re.IGNORECASE)
    files = [f for f in (ROOT / "wholestep").rglob("*.py") if f.relative_to(ROOT).parts[1] not in ("bench", "cli")]
    found = [f"{f.name}:{number}" for f in files for number, line in lines(f) if named.search(line)]
    assert len(files) > 100 and named.search("of a ResNet50 ...") and found == []


def lines(file: Path) -> list[tuple[int, str]]:
    return list(enumerate(file.read_text(encoding="utf-8").splitlines(), 1))


def test_a_name_or_size_that_is_none_is_said_before_anything_begins() -> None:
    with pytest.raises(InputError, match="nobody@tiny cannot be built: there is no network 'nobody': gpt2, "):
        workload.cases(["nobody@tiny"], "full")
    with pytest.raises(InputError, match="gpt2@huge cannot be built: there is no size 'huge': full, "):
        workload.cases(["gpt2@huge"], "full")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="gpt2@tiny needs the package transformers, which is not installed"):
        workload.build(workload.Case("gpt2", "tiny"), "cpu")
