"""Models, losses and batches of every form that capture promises, each trained beside eager PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.runtime.runs import Body, Perceptron, adamw, compare, data, fresh, sgd, squares
from wholestep.capture.capture import capture
from wholestep.errors import CaptureError, InputError


def spread(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    return squares(model, *batch)


def labels(count: int = 6, classes: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


# ---- parameters and buffers ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_tied_parameters_are_one_argument_and_get_both_gradients():
    model, ids = fresh(Tied), torch.tensor([[1, 2, 3], [0, 6, 6]])

    def loss(m, ids):
        return F.cross_entropy(m(ids).flatten(0, 1), ids.flatten())

    captured = capture(model, loss, (ids,))
    assert [s.name for s in captured.slots if s.kind == "parameter"] == ["embed.weight"]
    step = compare(model, loss, [(ids,)] * 3, lambda m, b: loss(m, *b), adamw)
    assert model.head.weight is model.embed.weight
    assert step.report().parameters == 1


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_eager_keeps_sparse(kind):
    model, ids = fresh(lambda: kind(7, 4, sparse=True)), torch.tensor([[1, 2, 3], [0, 6, 6]])
    compare(model, squares, [(ids,)] * 3, spread, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


def test_batchnorm_statistics_follow_eager():
    def make():
        return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))

    model = fresh(make)
    compare(model, squares, [(data(3, 2, 5, seed=s),) for s in range(4)], spread)
    assert int(model[1].num_batches_tracked) == 4


def count_in_place(m, x):
    m.calls.add_(1)
    with torch.no_grad():
        m.mean.lerp_(m.layer(x).mean(0), 0.1)
    return (m.layer(x) - m.mean) * m.calls


def count_by_assignment(m, x):
    m.calls = m.calls + 1
    m.mean = 0.9 * m.mean + 0.1 * x.mean(0)
    return (m.layer(x) - m.mean) * m.calls


@pytest.mark.parametrize("function", [count_in_place, count_by_assignment])
def test_buffers_that_forward_changes(function):
    model = fresh(lambda: Body(function, calls=torch.tensor(0), mean=torch.zeros(4)))
    compare(model, squares, [(data(3, 4, seed=s),) for s in range(3)], spread)
    assert int(model.calls) == 3


def test_two_buffers_that_change_places():
    def swap(m, x):
        a, b = m.a.clone(), m.b.clone()
        m.a.copy_(b)
        m.b.copy_(a)
        return m.layer(x) * m.a

    model = fresh(lambda: Body(swap, a=torch.tensor(1.0), b=torch.tensor(2.0)))
    compare(model, squares, [(data(3, 4),)] * 3, spread)
    assert (float(model.a), float(model.b)) == (2.0, 1.0)


def test_a_buffer_that_takes_the_parameter_before_its_update():
    def remember(m, x):
        m.past.copy_(m.layer.bias.detach())
        return m.layer(x)

    compare(fresh(lambda: Body(remember, past=torch.zeros(4))), squares, [(data(3, 4),)] * 3, spread)


def test_frozen_parameters_stay():
    model = fresh(Perceptron)
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    step = compare(model, squares, [(data(3, 4),)] * 3, spread, adamw)
    assert torch.equal(model.first.weight, before)
    assert step.report().parameters == 2


@pytest.mark.parametrize("options", [{}, {"level": 0}, {"accumulate": 3}], ids=str)
def test_frozen_parameters_that_follow_others_by_momentum(options, tmp_path):
    def follow(m, x):
        with torch.no_grad():
            for mine, other in zip(m.slow.parameters(), m.layer.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
            goal = m.slow(x) + 1
        return m.layer(x) - goal

    def eager(model, batch):
        return sum(squares(model, part) for part in batch[0].chunk(pieces)) / pieces

    pieces = options.get("accumulate", 1)
    model = fresh(lambda: Body(follow, slow=nn.Linear(4, 4).requires_grad_(False)))
    batches = [(data(6, 4, seed=s),) for s in range(3)]
    step = compare(model, squares, batches, eager, providers=["aten"], **options)
    step.save(tmp_path / "follow.step")
    again = copy.deepcopy(model)
    loaded = ws.load(tmp_path / "follow.step", again, squares, sgd(again))
    loaded.load_state_dict(copy.deepcopy(step.state_dict()))
    assert [float(step(*b)) for b in batches] == [float(loaded(*b)) for b in batches]
    model.slow.requires_grad_(True)
    with pytest.raises(CaptureError, match=r"changes parameter slow.weight in place; .*requires_grad_\(False\)"):
        ws.compile(model, squares, sgd(model), (data(3, 4),))


def test_a_buffer_may_not_change_its_shape():
    def grow(m, x):
        m.past = torch.cat([m.past, x])
        return m.layer(x)

    with pytest.raises(CaptureError, match="replaces the buffer past of Body by a tensor of another shape"):
        model = fresh(lambda: Body(grow, past=torch.zeros(1, 4)))
        ws.compile(model, squares, sgd(model), (data(3, 4),))


def test_a_tensor_attribute_that_is_no_buffer_is_refused_where_it_is_read():
    def recur(m, x):
        m.hidden = torch.tanh(m.layer(x) + m.hidden).detach()
        return m.layer(x) + m.hidden

    model = fresh(lambda: Body(recur))
    model.hidden = hidden = data(3, 4)
    with pytest.raises(CaptureError, match=r"reads and replaces the tensor hidden[\s\S]*register_buffer\('hidden'"):
        ws.compile(model, squares, sgd(model), (data(3, 4),))
    assert model.hidden is hidden


def test_a_tensor_attribute_that_is_only_written_gives_a_warning():
    def note(m, x):
        m.seen = m.layer(x)
        return m.seen

    model = fresh(lambda: Body(note, seen=None))
    with pytest.warns(UserWarning, match="forward keeps tensors in seen"):
        ws.compile(model, squares, sgd(model), (data(3, 4),))
    assert model.seen is None


# ---- batches ---------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x scale")


class Typed(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    scale: torch.Tensor
    factor: float = 2.0


def of_nested(m, inner):
    x, more = inner
    return m.layer(x) * more["scale"] * more["deep"][0]


NESTED = [
    (lambda m, r: m.layer(r.x) * r.scale * r.factor, lambda x: Record(x, torch.tensor(0.5), 3.0)),
    (lambda m, r: m.layer(r.x) * r.scale, lambda x: Pair(x, torch.tensor(0.5))),
    (lambda m, r: m.layer(r.x) * r.scale, lambda x: Typed(x, torch.tensor(0.5))),
    (of_nested, lambda x: (x, {"scale": torch.tensor(0.5), "deep": [torch.tensor(2.0), None, "text"]})),
    (of_nested, lambda x: [x, OrderedDict(scale=torch.tensor(0.5), deep=(torch.tensor(2.0),))]),
    (of_nested, lambda x: [x, defaultdict(list, scale=torch.tensor(0.5), deep=[torch.tensor(2.0)])]),
]


@pytest.mark.parametrize("function, make", NESTED)
def test_nested_inputs(function, make):
    batches = [(make(data(3, 4, seed=s)),) for s in range(2)]
    compare(fresh(lambda: Body(function)), squares, batches, spread)


def test_a_dataclass_alone_is_a_batch():
    batches = [Record(data(3, 4, seed=s), torch.tensor(0.5)) for s in range(2)]
    compare(fresh(lambda: Body(NESTED[0][0])), squares, batches, squares)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_keyword_batches_by_keywords_and_as_one_mapping(kind):
    def loss(model, x, y):
        return F.mse_loss(model(x), y)

    model = fresh(Perceptron)
    batch = kind(x=data(6, 4), y=data(6, 3, seed=1))
    step = compare(model, loss, [batch] * 2, lambda m, b: loss(m, **b))
    by_name, as_one = step(**batch), step(batch)
    assert float(as_one) < float(by_name)
    assert float(step(y=batch["y"], x=batch["x"])) < float(as_one)


@pytest.mark.parametrize(
    "loss_fn",
    [lambda model, batch: squares(model, batch["x"]), lambda model, **batch: squares(model, batch["x"])],
)
def test_a_loss_may_take_a_keyword_batch_whole(loss_fn):
    compare(fresh(Perceptron), loss_fn, [{"x": data(6, 4)}] * 2, lambda m, b: squares(m, b["x"]))


def test_the_same_tensor_twice_in_a_batch():
    x = data(3, 4)
    compare(fresh(lambda: Body(lambda m, a, b: m.layer(a) * b)), squares, [(x, x)] * 2, spread)


def test_integer_bool_and_zero_dimensional_inputs():
    def use(m, index, mask, count, scale):
        return torch.where(mask[:, None], m.layer.weight[index], m.layer.bias) * count * scale

    index, mask = torch.tensor([0, 3, 1], dtype=torch.int32), torch.tensor([True, False, True])
    batch = (index.long(), mask, torch.tensor(3), torch.tensor(0.5))
    compare(fresh(lambda: Body(use)), squares, [batch] * 2, spread)


def test_non_contiguous_and_expanded_inputs():
    wide = data(4, 6)
    batches = [(wide.t(),), (wide.t().contiguous(),), (data(1, 4).expand(6, 4),), (data(6, 8)[:, ::2],)]
    compare(fresh(Perceptron), squares, batches, spread)


def test_numbers_in_a_batch_are_constants():
    model = fresh(lambda: Body(lambda m, x, scale: m.layer(x) * scale))
    step = compare(model, squares, [(data(3, 4), 0.5)] * 2, spread)
    with pytest.raises(InputError, match=r"batch\[1\] was 0.5 when compiled and is 0.25 now"):
        step(data(3, 4), 0.25)


def test_an_empty_batch():
    compare(fresh(lambda: Body(lambda m: m.layer.weight)), squares, [()] * 2, spread)


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_loss_of_output_and_target():
    batch = (data(6, 4), labels())
    compare(fresh(Perceptron), F.cross_entropy, [batch] * 2, lambda m, b: F.cross_entropy(m(b[0]), b[1]))


def test_loss_with_options_still_takes_output_and_target():
    def loss(output, target, smoothing=0.1, **more):
        return F.cross_entropy(output, target, label_smoothing=smoothing)

    batch = (data(6, 4), labels())
    compare(fresh(Perceptron), loss, [batch] * 2, lambda m, b: loss(m(b[0]), b[1]))


def test_loss_of_model_with_optional_parts():
    def loss(model, x, target=None):
        return F.cross_entropy(model(x), target)

    batch = (data(6, 4), labels())
    compare(fresh(Perceptron), loss, [batch] * 2, lambda m, b: loss(m, *b))


def test_loss_module_with_class_weights():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5]))
    batch = (data(6, 4), labels())
    model = fresh(Perceptron)
    captured = capture(model, loss, batch)
    assert [s.name for s in captured.slots if s.kind == "buffer"] == ["loss_fn.weight"]
    compare(model, loss, [batch] * 2, lambda m, b: loss(m(b[0]), b[1]))


def test_loss_module_with_parameters_of_its_own():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output, target):
            return F.cross_entropy(output * self.scale, target)

    model, loss = fresh(Perceptron), Scaled()
    twin, twin_loss = fresh(Perceptron), Scaled()
    batch = (data(6, 4), labels())
    step = ws.compile(model, loss, torch.optim.SGD([*model.parameters(), loss.scale], lr=0.1), batch)
    optimizer = torch.optim.SGD([*twin.parameters(), twin_loss.scale], lr=0.1)
    for _ in range(2):
        step(*batch)
        optimizer.zero_grad()
        twin_loss(twin(batch[0]), batch[1]).backward()
        optimizer.step()
    torch.testing.assert_close(loss.scale, twin_loss.scale)
    assert loss.scale.item() != 2.0


def test_a_model_that_returns_its_loss():
    model = fresh(lambda: Body(lambda m, x: m.layer(x).pow(2).mean()))
    step = compare(model, None, [(data(3, 4),)] * 2, lambda m, b: m(*b))
    assert step(data(3, 4)).shape == ()


def test_a_model_that_returns_its_loss_among_other_things():
    model = fresh(lambda: Body(lambda m, x: {"loss": m.layer(x).pow(2).mean(), "logits": m.layer(x)}))
    step = compare(model, None, [{"x": data(3, 4)}] * 2, lambda m, b: m(**b)["loss"])
    assert isinstance(step(x=data(3, 4)), torch.Tensor)


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str


def test_several_outputs_come_back_in_the_same_structure():
    def answer(model, x):
        out = model(x)
        return Answer(out.pow(2).mean(), out, (out.argmax(-1), x * 2), "kept")

    model = fresh(Perceptron)
    x = data(6, 4)
    with torch.no_grad():
        expected = answer(model, x)
    step = ws.compile(model, answer, sgd(model), (x,))
    got = step(x)
    assert isinstance(got, Answer) and isinstance(got.hidden, tuple) and got.note == "kept"
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.logits, expected.logits)
    assert torch.equal(got.hidden[0], expected.hidden[0]) and torch.equal(got.hidden[1], x * 2)
    assert step.last.outputs is got and float(step.last.loss) == float(got.loss)


def test_outputs_of_transformers_keep_their_class():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = fresh(lambda: GPT2LMHeadModel(config))
    ids = torch.tensor([[1, 2, 3, 4]])

    def loss(model, input_ids, labels):
        return model(input_ids=input_ids, labels=labels, use_cache=False, output_hidden_states=True)

    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        expected = loss(model, **batch)
    step = ws.compile(model, loss, sgd(model), batch)
    got = step(**batch)
    assert type(got) is type(expected)
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got["logits"], expected.logits)
    assert isinstance(got.hidden_states, tuple) and len(got.hidden_states) == len(expected.hidden_states)


def test_batch_encodings_of_transformers_are_keyword_batches():
    from transformers import BatchEncoding

    batch = BatchEncoding({"x": data(3, 4)})
    step = compare(fresh(Perceptron), lambda model, x: squares(model, x), [batch] * 2, lambda m, b: squares(m, b["x"]))
    assert float(step(batch)) > 0 and float(step({"x": data(3, 4)})) > 0


# ---- code inside the model -------------------------------------------------------------------------------------------


def in_place_and_views(m, x):
    h = m.layer(x)
    h[:, 0] = h[:, 1] * 2
    h[:, 2:].add_(1.0)
    row = h[0]
    row.mul_(0.5)
    y = h.clone()
    y.view(-1, 2, 2)[:, 1].mul_(h.view(-1, 2, 2)[:, 0])
    y.t()[1].relu_()
    return y


def test_in_place_operations_and_views():
    compare(fresh(lambda: Body(in_place_and_views)), squares, [(data(3, 4),)] * 2, spread)


def test_no_grad_and_detach_cut_gradients():
    def cut(m, x):
        h = m.layer(x)
        with torch.no_grad():
            scale = h.abs().mean()
        return h * scale + h.detach()

    compare(fresh(lambda: Body(cut)), squares, [(data(3, 4),)] * 2, spread)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_ordinary_code(reentrant):
    def recompute(m, x):
        h = m.layer(x)
        for _ in range(2):
            h = checkpoint(lambda t: torch.tanh(m.layer(t)), h, use_reentrant=reentrant)
        return h

    compare(fresh(lambda: Body(recompute)), squares, [(data(3, 4),)] * 2, spread)
    assert torch.utils.checkpoint.CheckpointFunction.apply.__func__ is torch.autograd.Function.apply.__func__


def test_a_reentrant_checkpoint_without_inputs_that_need_gradients_gives_none_as_in_eager():
    model = fresh(lambda: Body(lambda m, x: checkpoint(m.layer, x, use_reentrant=True)))
    with pytest.raises(InputError, match="loss does not depend on any parameter"):
        ws.compile(model, squares, sgd(model), (data(3, 4),))


class Rounding(torch.autograd.Function):
    """A straight-through estimator: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        ctx.save_for_backward(x)
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1) * ctx.scale, None


class Split(torch.autograd.Function):
    """The newer form, with two inputs, two outputs and a tensor kept as an attribute."""

    @staticmethod
    def forward(x, y):
        return x * y, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.y = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, left, right):
        return 3 * left * ctx.y + right, 2 * left * ctx.saved_tensors[0]


def test_custom_functions_keep_their_own_backward():
    def use(m, x):
        left, right = Split.apply(m.layer(x), m.layer.bias * x)
        return Rounding.apply(left, 4.0) + right + Rounding.apply(right, 2.0)

    model = fresh(lambda: Body(use))
    original = torch.autograd.Function.apply
    step = compare(model, squares, [(data(3, 4),)] * 3, spread)
    assert torch.autograd.Function.apply == original
    assert step.report().opaque["wholestep.custom_function.default"] == 3


def test_forward_hooks_are_part_of_the_program():
    model = fresh(Perceptron)
    model.first.register_forward_hook(lambda module, inputs, output: output * 2)
    compare(model, squares, [(data(3, 4),)] * 2, spread)


def test_parametrized_weights():
    model = fresh(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()))
    compare(model, squares, [(data(3, 4),)] * 2, spread)
