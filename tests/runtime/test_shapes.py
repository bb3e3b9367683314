"""Batches of changing shapes: refused, compiled once more, or padded where the model's masks make that exact."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, assert_same, data, eager_step, fresh, sgd, squares
from wholestep.errors import InputError
from wholestep.runtime.padding import bucket


def test_a_smaller_last_batch_is_an_error_that_names_the_dimension():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),))
    with pytest.raises(InputError, match=r'dimension 0 is 5 instead of 6.*\nTry: shapes="bucket"'):
        step(data(5, 4))
    assert step.report().compilations == 1


def test_another_shape_is_compiled_once():
    model = fresh(Perceptron)
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)
    step = ws.compile(model, squares, optimizer, (data(6, 4),), shapes="bucket")
    for seed, rows in enumerate((6, 6, 5, 6, 5)):
        x = data(rows, 4, seed=seed)
        loss = step(x)
        torch.testing.assert_close(float(loss), eager_step(lambda m, x=x: squares(m, x), twin, other))
    assert_same(model, twin, 1e-6)
    report = step.report()
    assert report.compilations == 2 and report.variants == [[[6, 4]], [[5, 4]]]
    assert "2 batch shapes are compiled: 6x4; 5x4 (0 dropped)" in str(report)


def test_the_least_recently_used_shape_goes():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(3, 4),), shapes="bucket", max_variants=2)
    for rows in (4, 3, 5):  # 4 is the least recently used when 5 comes
        step(data(rows, 4))
    assert step.report().variants == [[[3, 4]], [[5, 4]]] and step.report().dropped == 1
    step(data(3, 4))
    assert step.compilations == 3
    step(data(4, 4))
    assert step.compilations == 4


def test_freezing_recompiles_each_shape():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(3, 4),), shapes="bucket")
    step(data(4, 4))
    model.first.requires_grad_(False)
    before = model.first.weight.detach().clone()
    step(data(3, 4))
    step(data(4, 4))
    assert step.compilations == 4 and torch.equal(before, model.first.weight.detach())


class Reader(nn.Module):
    """Attention over tokens with a mask, and a loss that ignores -100; `leaky` also looks at the mean of everything."""

    def __init__(self, leaky: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.query, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.dropout, self.leaky = nn.Dropout(dropout), leaky

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids)
        scores = self.query(x) @ x.transpose(1, 2)
        scores = scores.masked_fill(attention_mask[:, None, :] == 0, float("-inf"))
        x = self.dropout(torch.softmax(scores, -1) @ x)
        if self.leaky:
            x = x + x.mean(1, keepdim=True)
        logits = self.out(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def whole_output(model: nn.Module, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return model(**batch)


def tokens(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 11, (3, length), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.roll(-1, 1)}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_sequences_are_padded_where_masks_make_it_exact(dropout):
    model = fresh(lambda: Reader(dropout=dropout))
    twin = copy.deepcopy(model)
    optimizer, other = sgd(model), sgd(twin)
    step = ws.compile(model, whole_output, optimizer, tokens(17), shapes="bucket")
    for seed, length in enumerate((17, 18, 19, 20)):
        batch = tokens(length, seed)
        result = step(**batch)
        assert result["logits"].shape == (3, length, 11)
        if not dropout:
            expected = eager_step(lambda m, batch=batch: m(**batch)["loss"], twin, other)
            torch.testing.assert_close(float(result["loss"]), expected, rtol=1e-5, atol=1e-6)
    if not dropout:
        assert_same(model, twin, 1e-5)
    assert step.compilations == 1 and step.report().variants == [[[3, 20]] * 3]
    step(**tokens(21))
    assert step.compilations == 2


def test_no_padding_where_it_would_change_the_result():
    model = fresh(lambda: Reader(leaky=True))
    twin = copy.deepcopy(model)
    optimizer, other = sgd(model), sgd(twin)
    step = ws.compile(model, whole_output, optimizer, tokens(17), shapes="bucket")
    for seed, length in enumerate((17, 18)):
        batch = tokens(length, seed)
        expected = eager_step(lambda m, batch=batch: m(**batch)["loss"], twin, other)
        torch.testing.assert_close(float(step(**batch)["loss"]), expected, rtol=1e-5, atol=1e-6)
    assert step.compilations == 2 and step.report().variants == [[[3, 17]] * 3, [[3, 18]] * 3]
    assert "of a padded batch is" in str(step.report())


def test_names_for_padding_may_be_given():
    model = fresh(Reader)
    step = ws.compile(
        model, lambda m, a, b, c: m(a, b, c)["loss"], sgd(model), tuple(tokens(17).values()), shapes="bucket",
        pad={"0": 1, "1": 0, "2": -100},
    )  # fmt: skip
    for length in (17, 19):
        step(*tokens(length).values())
    assert step.compilations == 1


def test_a_sequence_nobody_can_pad_gets_its_own_program():
    model = fresh(Reader)
    batch = tokens(17)
    step = ws.compile(
        model, lambda m, extra, **b: m(**b)["loss"] + 0 * extra.sum(), sgd(model), {**batch, "extra": data(3, 17)},
        shapes="bucket",
    )  # fmt: skip
    step(**tokens(18), extra=data(3, 18))
    assert step.compilations == 2
    assert "batch.extra has the length of a sequence and pad= does not say how to fill it" in str(step.report())


class Summary(nn.Module):
    """One answer out of 20 per sequence, and an output that grows with the sequence in its own way."""

    def __init__(self, extra: Any = None, norm: bool = False) -> None:
        super().__init__()
        self.embed, self.out, self.extra = nn.Embedding(11, 8), nn.Linear(8, 20), extra
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, input_ids, attention_mask, labels):
        x = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        mask = attention_mask[..., None].to(x.dtype)
        logits = self.out((x * mask).sum(1) / mask.sum(1))
        loss = nn.functional.cross_entropy(logits, labels[:, 0])
        return {"loss": loss, "logits": logits} | ({} if self.extra is None else {"extra": self.extra(x * mask, mask)})


@pytest.mark.parametrize(
    ("extra", "padding"),
    [
        (None, "checked to be exact"),
        (lambda x, mask: (x @ x.transpose(1, 2))[:, None], "checked to be exact"),  # the sequence is dimensions 2 and 3
        (lambda x, mask: x.flatten(0, 1), r"output 2 has shape \[60, 8\] instead of \[54, 8\], which cannot be cut"),
        (lambda x, mask: mask.mean(), "output 2 of a padded batch has other values"),
    ],
)
def test_outputs_are_those_of_the_batch_as_it_is(extra, padding):
    model = fresh(lambda: Summary(extra))
    batch, twin = tokens(18), copy.deepcopy(model)
    step = ws.compile(model, whole_output, sgd(model), tokens(20), shapes="bucket")  # as long as there are answers
    torch.testing.assert_close(step(**batch), {k: v.detach() for k, v in twin(**batch).items()})
    assert re.search(padding, step.report().padding)


def test_padding_is_measured_again_when_a_layer_changes_its_mode():
    model = fresh(lambda: Summary(norm=True))
    model.norm.eval()
    step = ws.compile(model, whole_output, sgd(model), tokens(20), shapes="bucket")
    step(**tokens(18))
    assert "exact" in step.report().padding
    model.norm.train()
    batch, twin = tokens(18), copy.deepcopy(model)
    torch.testing.assert_close(float(step(**batch)["loss"]), float(twin(**batch)["loss"].detach()))
    assert "not padded" in step.report().padding


def test_a_batch_that_is_wrong_decides_nothing_about_padding():
    model = fresh(Summary)
    step = ws.compile(model, whole_output, sgd(model), tokens(20), shapes="bucket")
    wrong = tokens(18)
    with pytest.raises(InputError, match=r"labels is torch\.float32"):
        step(**wrong | {"labels": wrong["labels"].float()})
    with pytest.raises(IndexError):
        step(**wrong | {"labels": wrong["labels"] + 50})
    step(**wrong)
    assert "exact" in step.report().padding


def test_sequences_of_different_lengths_get_their_own_program():
    def loss(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (model(source).mean(1, keepdim=True) - model(target)).pow(2).mean()

    model, ids = fresh(lambda: nn.Embedding(11, 4)), tokens(20)["input_ids"]
    step = ws.compile(model, loss, sgd(model), (ids, ids), shapes="bucket", pad={"0": 0, "1": 0})
    step(ids[:, :18], ids[:, :17])
    assert step.report().variants == [[[3, 20], [3, 20]], [[3, 18], [3, 17]]]
    assert "sequences of one batch have different lengths (17, 18)" in str(step.report())


def test_a_wrong_name_for_padding_is_noticed():
    model = fresh(Reader)
    with pytest.raises(InputError, match="pad names 'input', which is no tensor of the batch; it has input_ids, att"):
        ws.compile(model, whole_output, sgd(model), tokens(17), shapes="bucket", pad={"input": 0})


def test_buckets_waste_at_most_a_quarter():
    for length in range(17, 3000):
        size = bucket(length)
        assert length <= size <= 1.25 * length and bucket(size) == size
    assert len({bucket(n) for n in range(17, 3000)}) < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": "dynamic"}, "shapes must be one of static, bucket, not 'dynamic'"),
        ({"shapes": "buckets"}, "did you mean 'bucket'?"),
        ({"max_variants": 0}, "max_variants must be a positive number"),
        ({"pad": {"labels": -100}}, 'pad= only has a meaning with shapes="bucket"'),
        ({"pad": [0], "shapes": "bucket"}, "pad maps names of the batch"),
    ],
)
def test_bad_options(options, message):
    model = fresh(Perceptron)
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        ws.compile(model, squares, sgd(model), (data(6, 4),), **options)
