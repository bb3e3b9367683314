"""Networks of transformers, exported by torch.onnx and imported again, train as the original modules do.

In float64, so that the tolerance can be tight: it is left to the attributes of ONNX nodes, which are float32 (epsilon,
momentum). Ten steps of AdamW; all parameters, running statistics and losses are compared. Some go through the whole
pipeline in float32, and in bf16 beside torch.autocast.
"""

from __future__ import annotations

import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

onnx = pytest.importorskip("onnx")
transformers = pytest.importorskip("transformers")

import wholestep as ws  # noqa: E402
from wholestep.onnx import from_onnx  # noqa: E402

STEPS = 10


class Logits(nn.Module):
    """A network's logits from its inputs by name."""

    def __init__(self, network: nn.Module, names: list[str]):
        super().__init__()
        self.network = network
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.network(**dict(zip(self.names, inputs, strict=True))).logits


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 64, shape)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(2, 8), "attention_mask": mask}, tokens(2, 8)


def bert():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config), {"input_ids": tokens(2, 8)}, torch.tensor([1, 3])


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    images = torch.randn(4, 3, 16, 16)
    return transformers.ResNetForImageClassification(config), {"pixel_values": images}, torch.tensor([0, 1, 2, 3])


def efficientnet():
    config = transformers.EfficientNetConfig(
        image_size=32, width_coefficient=0.025, depth_coefficient=0.2, hidden_dim=32, num_labels=4, dropout_rate=0.0,
        drop_connect_rate=0.0, kernel_sizes=[3, 5], in_channels=[32, 16], out_channels=[16, 24], depthwise_padding=[],
        strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 4], initializer_range=0.3,
    )  # fmt: skip
    images = torch.randn(4, 3, 32, 32)
    return transformers.EfficientNetForImageClassification(config), {"pixel_values": images}, torch.tensor([0, 1, 2, 3])


def vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(2, 3, 16, 16)
    return transformers.ViTForImageClassification(config), {"pixel_values": images}, torch.tensor([1, 3])


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    inputs = {"input_ids": tokens(2, 8), "decoder_input_ids": tokens(2, 6)}
    return transformers.T5ForConditionalGeneration(config), inputs, tokens(2, 6)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def exported(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, inputs, file, dynamo=False, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
            opset_version=17,
        )  # fmt: skip
    return file.getvalue()


def assert_trains_alike(network, dtype: torch.dtype, loss_rtol: float, rtol: float, atol: float, **options):
    """Ten steps of AdamW: the imported network, compiled, beside the original one, eagerly."""
    torch.manual_seed(0)
    module, named, target = network()
    original = Logits(module, list(named)).to(dtype).train()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in named.values())
    imported = from_onnx(exported(original, inputs)).train()
    variances = population_variances(original)
    theirs = dict(original.named_parameters())
    mine = dict(imported.named_parameters())
    assert set(mine) <= set(theirs)
    optimizer = torch.optim.AdamW(imported.parameters(), lr=1e-2)
    reference = torch.optim.AdamW([theirs[name] for name in mine], lr=1e-2)
    step = ws.compile(imported, loss_fn, optimizer, (*inputs, target), **options)
    for _ in range(STEPS):
        loss = step(*inputs, target)
        reference.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("precision") == "bf16"):
            wanted = loss_fn(original(*inputs), target)
        wanted.backward()
        reference.step()
        torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=loss_rtol, atol=1e-9)
    used = {name for name, p in theirs.items() if p.grad is not None}
    assert used <= set(mine)
    state = original.state_dict() | variances
    for name, tensor in imported.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    return step


@pytest.mark.parametrize("network", [gpt2, bert, resnet, efficientnet, vit, t5])
def test_training_is_that_of_the_original_module(network):
    assert_trains_alike(network, torch.float64, 1e-6, 1e-5, 1e-7, level=0)


@pytest.mark.parametrize(
    "network, tolerance, options",
    [
        (gpt2, 1e-5, {}),
        (resnet, 1e-5, {}),
        (resnet, 1e-2, {"precision": "bf16"}),
    ],
)
def test_the_whole_pipeline_trains_it_too(network, tolerance, options):
    """Passes, a plan of the memory and its execution; AdamW divides by tiny numbers, so parameters differ by more."""
    step = assert_trains_alike(network, torch.float32, tolerance, 10 * tolerance, 100 * tolerance, **options)
    text = str(step.report())
    assert "execution: from the plan" in text
    if "precision" in options:
        assert "low-precision copies" in text


def population_variances(model: nn.Module) -> dict[str, torch.Tensor]:
    """Running variances as ONNX defines them, kept up to date: of all n numbers, where torch divides by n - 1."""
    kept = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            kept[f"{name}.running_var"] = variance = layer.running_var.clone()

            def follow(layer: nn.Module, args: tuple[torch.Tensor, ...], variance: torch.Tensor = variance) -> None:
                variance.lerp_(args[0].detach().to(variance).var((0, 2, 3), unbiased=False), layer.momentum)

            layer.register_forward_pre_hook(follow)
    return kept
