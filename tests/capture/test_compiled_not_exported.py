"""What a model is told while it is captured: that it is compiled, not exported. Masks stay operands of the step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.capture.capture import capture
from wholestep.capture.sandbox import compiled_not_exported
from wholestep.errors import CaptureError
from wholestep.ir.core import Op

SMALL: dict[str, Any] = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=64,
    attention_dropout=0.0,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=99, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SMALL))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL))


def batch(mask: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})


def attention_ops(module: Op) -> list[Op]:
    return [op for op in module.walk() if op.name == "step.attention"]


@pytest.mark.parametrize(("make", "causal"), [(gpt2, True), (llama, True), (bert, False)])
def test_no_mask_is_made_where_none_is_given(make: Callable[[], nn.Module], causal: bool) -> None:
    ops = attention_ops(capture(make(), None, batch(mask=False)).module)
    assert [(op.causal, op.mask) for op in ops] == [(causal, None)]


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_a_mask_of_ones_is_not_baked_in(make: Callable[[], nn.Module]) -> None:
    """The example batch has no padding; a later one has, and the step must follow its mask."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    example = batch(mask=True)
    step = ws.compile(model, None, torch.optim.SGD(model.parameters(), lr=0.1), example)
    (op,) = attention_ops(step.program())
    assert op.mask is not None
    eager = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = []
    for padded in (0, 3):
        given = {k: v.clone() for k, v in example.items()}
        given["attention_mask"][1, 8 - padded :] = 0
        loss = twin(**given).loss
        eager.zero_grad()
        loss.backward()
        eager.step()
        torch.testing.assert_close(step(**given), loss.detach(), rtol=1e-6, atol=1e-6)
        losses.append(float(loss.detach()))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    unpadded = float(twin(**example).loss.detach())
    assert abs(float(twin(**given).loss.detach()) - unpadded) > 1e-4  # the mask does matter
    assert losses[0] != losses[1]


class AsksExporting(nn.Linear):
    """Reads a value of the batch unless it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.sum() > 0:
            x = x * 2
        return super().forward(x)


def test_a_second_attempt_and_a_warning() -> None:
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match=r"is_exporting\(\) true(.|\n)*values in a tensor"):
        captured = capture(AsksExporting(3, 2), lambda m, x: m(x).sum(), (x,))
    assert not any(op.name in ("step.gt", "step.mul") for op in captured.module.walk())


class NeverWorks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_where_both_fail_the_error_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CaptureError, match="values in a tensor"):
            capture(NeverWorks(3, 2), lambda m, x: m(x).sum(), (torch.randn(2, 3),))


class Answers(nn.Linear):
    """Notes what it is told."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TOLD.append((torch.compiler.is_compiling(), torch.compiler.is_exporting()))
        return super().forward(x)


TOLD: list[tuple[bool, bool]] = []


def test_what_a_model_is_told() -> None:
    TOLD.clear()
    before = torch.compiler.is_exporting
    capture(Answers(3, 2), lambda m, x: m(x).sum(), (torch.randn(2, 3),))
    assert set(TOLD) == {(True, False)}
    assert torch.compiler.is_exporting is before


@torch.jit.script
def by_width(x: torch.Tensor) -> torch.Tensor:
    return x / float(x.size(-1))


class Scripted(nn.Linear):
    """Calls TorchScript, which asks whether it is exported from C++: the frame it is asked from is this forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(by_width(x))


def test_script_functions_are_told_the_truth() -> None:
    captured = capture(Scripted(3, 2), lambda m, x: m(x).sum(), (torch.randn(2, 3),))
    assert captured.opaque == {}


def test_torch_itself_is_told_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    ask = compile("import torch\nanswer = torch.compiler.is_exporting()", torch.__file__, "exec")
    told: dict[str, Any] = {}
    with compiled_not_exported():
        exec(ask, told)
        assert told["answer"] is True
        assert torch.compiler.is_exporting() is False
    assert torch.compiler.is_exporting() is True
