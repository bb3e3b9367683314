"""Every network of the zoo trains ten steps like eager PyTorch, with AdamW and with SGD, in float32 on CPU."""

from __future__ import annotations

import os

import pytest
import torch

import wholestep as ws
from wholestep.errors import WholestepError

from . import KNOWN_FAILURES, ZOO
from .compare import KINDS, LOSS_TOLERANCE, PARAMETER_TOLERANCE, compare

#: one of each family runs with every change; WHOLESTEP_ZOO=all runs the rest too
CORE = [
    "gpt2",
    "llama",
    "xlnet",
    "bert",
    "bert-qa-eager",
    "deberta-v2",
    "modernbert",
    "t5",
    "prophetnet",
    "resnet",
    "efficientnet",
    "mobilenet-v2",
    "vit",
    "swin",
    "segformer",
    "wav2vec2-classifier",
    "whisper",
    "mixtral",
    "deepseek-v3",
    "mamba",
    "lstm",
    "dlrm",
    "wavenet",
    "mlp-mixer",
    "unet",
    "convnet",
    "graph-index-add",
    "graph-attention",
    "checkpointed-gpt",
    "in-place",
    "frozen-backbone",
]
ALL = os.environ.get("WHOLESTEP_ZOO") == "all"
CHOSEN = list(ZOO) if ALL else CORE
#: tests/networks trains networks of these families for fifty steps with every change
TRAINED_LONGER = set() if ALL else {"llama", "bert", "vit", "resnet", "efficientnet", "mobilenet-v2", "dlrm", "wavenet"}
#: with every change each network has one of the optimizers, in turn
TURNS = [(n, k) for i, n in enumerate(CHOSEN) for j, k in enumerate(KINDS) if ALL or i % 2 == j % 2]
RUNS = [(name, kind) for name, kind in TURNS if name not in TRAINED_LONGER]


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_trains_like_eager(name: str, kind: str) -> None:
    entry = ZOO[name]
    found = compare(entry, kind)
    assert found.loss <= LOSS_TOLERANCE
    assert found.parameters <= PARAMETER_TOLERANCE
    assert found.agrees(entry.lr[KINDS.index(kind)])


@pytest.mark.parametrize("name", list(KNOWN_FAILURES))
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    """Networks outside a static program give one clear error, never a wrong gradient."""
    entry = KNOWN_FAILURES[name]
    model, batch = entry.build()
    with pytest.raises(WholestepError) as caught:
        ws.compile(model, entry.loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert str(caught.value)
