"""Layer drop: captured where the probability is 0, one clear error where it is not, however the number is drawn."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import wholestep as ws
from tests.runtime.runs import Body, compare, data, fresh, sgd, squares
from wholestep.capture.sandbox import extreme_draws
from wholestep.errors import CaptureError


def torch_scalar(m, x):
    h = m.layer(x)
    if torch.rand([]) < m.p:
        return x
    return h


def torch_flipped(m, x):
    skip = m.training and m.p > torch.rand(1)
    return x if skip else m.layer(x)


def torch_keep(m, x):
    return m.layer(x) if torch.rand(()) >= m.p else x


def torch_item(m, x):
    return x if torch.rand(1).item() < m.p else m.layer(x)


def python_random(m, x):
    return x if random.random() < m.p else m.layer(x)


def python_uniform(m, x):
    return x if random.uniform(0, 1) < m.p else m.layer(x)


def numpy_random(m, x):
    return x if np.random.uniform(0, 1) < m.p else m.layer(x)


EVERY = [
    torch_scalar,
    torch_flipped,
    torch_keep,
    torch_item,
    python_random,
    python_uniform,
    numpy_random,
]


@pytest.mark.parametrize("function", EVERY)
def test_probability_zero_captures(function):
    model = fresh(lambda: Body(function, p=0.0))
    compare(model, squares, [(data(3, 4),)] * 2, lambda m, b: squares(m, *b))


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize("p", [0.5, 1e-4])
def test_any_other_probability_is_refused_with_its_line(function, p):
    model = fresh(lambda: Body(function, p=p))
    with pytest.raises(CaptureError) as caught:
        ws.compile(model, squares, sgd(model), (data(3, 4),))
    text = str(caught.value)
    assert f"test_layerdrop.py:{function.__code__.co_firstlineno + 1} in {function.__name__}" in text or (
        f"test_layerdrop.py:{function.__code__.co_firstlineno + 2} in {function.__name__}" in text
    )
    assert "random number" in text
    if function.__name__.startswith("torch"):
        assert f"compared with {p:g}" in text and "layer-drop probability to 0" in text


def test_a_comparison_may_still_be_used_as_a_tensor():
    model = fresh(lambda: Body(lambda m, x: m.layer(x) * (torch.rand(1) < 1.0).float()))
    compare(model, squares, [(data(3, 4),)] * 2, lambda m, b: squares(m, *b))


@pytest.mark.parametrize("read", [torch.Tensor.item, float])
def test_a_random_number_may_not_leave_the_program(read):
    model = fresh(lambda: Body(lambda m, x: m.layer(x) * read(torch.rand(1))))
    with pytest.raises(CaptureError, match=r"a random number is read out of a tensor[\s\S]*keep it a tensor"):
        ws.compile(model, squares, sgd(model), (data(3, 4),))


def test_stochastic_depth_with_tensors_is_part_of_the_program():
    model = fresh(lambda: Body(lambda m, x: m.layer(x) * (torch.rand(3, 1) < 0.5)))
    step = ws.compile(model, squares, sgd(model, lr=1e-9), (data(3, 4),))
    assert len({float(step(data(3, 4))) for _ in range(12)}) > 1


def test_extreme_draws_are_the_ends_of_the_range():
    states = random.getstate(), np.random.get_state()
    try:
        extreme_draws(high=False)
        assert [random.random(), np.random.rand(), random.uniform(0, 1)] == [0.0, 0.0, 0.0]
        extreme_draws(high=True)
        assert min(random.random(), np.random.rand(), np.random.uniform()) > 1 - 1e-9
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def opt(p: float) -> torch.nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=2,
            ffn_dim=8,
            num_attention_heads=2,
            max_position_embeddings=8,
            word_embed_proj_dim=8,
            dropout=0.0,
            layerdrop=p,
        )
    )


def bart(p: float) -> torch.nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=11,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            max_position_embeddings=8,
            dropout=0.0,
            encoder_layerdrop=p,
            decoder_layerdrop=p,
        )
    )


@pytest.mark.parametrize("make", [opt, bart])
def test_transformers_models_with_layer_drop(make):
    ids = torch.tensor([[4, 5, 6, 7]])
    batch = {"input_ids": ids, "labels": ids}
    compare(fresh(lambda: make(0.0)), None, [batch] * 2, lambda m, b: m(**b).loss)
    model = fresh(lambda: make(0.25))
    with pytest.raises(CaptureError, match=rf"modeling_{make.__name__}.py:\d+ in forward[\s\S]*compared with 0.25"):
        ws.compile(model, None, sgd(model), batch)


def test_wav2vec2_with_layer_drop():
    from tests.zoo import ZOO

    model, batch = ZOO["wav2vec2-classifier"].build()
    step = ws.compile(model, None, sgd(model), batch)
    assert float(step(**batch)) > 0
    model.config.layerdrop = 0.1
    with pytest.raises(CaptureError, match=r"modeling_wav2vec2.py:\d+ in forward[\s\S]*compared with 0.1"):
        ws.compile(model, None, sgd(model), batch)
