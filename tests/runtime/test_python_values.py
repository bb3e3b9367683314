"""Python values that a program was made from: where they are others, it is compiled again. Tensors are not frozen."""

import copy
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws

SLOPE = 0.5


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.beta, self.unread, self.calls = 0.5, 0, 0
        self.scale, self.table = torch.tensor(1.5), torch.ones(3)

    def forward(self, x):
        self.calls += 1
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.beta * self.scale * self.table


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(number=0):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw)


class Pair:
    """A compiled and an eager model that train side by side. Made: the models that losses read from outside."""

    def __init__(self, make=Scaled, loss=lambda: loss_fn, **options):
        torch.manual_seed(0)
        self.ours = make()
        self.theirs = copy.deepcopy(self.ours)
        self.losses = [loss(), loss()]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.ours, self.theirs)]
        self.step = ws.compile(
            self.ours, self.losses[0], self.optimizers[0], batch(), **{"providers": ["aten"], **options}
        )

    def train(self, count=2):
        for number in range(count):
            found = self.step(*batch(number))
            self.optimizers[1].zero_grad()
            expected = self.losses[1](self.theirs, *batch(number))
            expected.backward()
            self.optimizers[1].step()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        for a, b in zip(self.ours.state_dict().values(), self.theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


CHANGES = {
    "a number": (lambda m: setattr(m, "beta", 2.0), "beta of Scaled was 0.5 and is 2.0"),
    "a setting of a layer": (lambda m: setattr(m.norm, "momentum", 0.7), "momentum of norm was 0.1 and is 0.7"),
    "another tensor": (lambda m: setattr(m, "table", torch.arange(3.0)), "table of Scaled is another Tensor"),
    "a tensor of one element that is filled": (lambda m: m.scale.fill_(3.0), ""),
    "a tensor that is filled": (lambda m: m.table.fill_(3.0), ""),
    "what forward does not read": (lambda m: setattr(m, "unread", 7), ""),
    "what forward changes itself": (lambda m: m(batch()[0]), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_of_layers(name):
    change, says = CHANGES[name]
    pair = Pair()
    pair.train()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in (pair.ours, pair.theirs):
            change(model)
        pair.train(3)
    assert pair.step.compilations == (2 if says else 1)
    assert [says in str(w.message) for w in said] == ([True] if says else [])


def test_names_of_a_loss_function():
    weight, settings, filled = 0.5, SimpleNamespace(share=0.3, steps=0), torch.tensor(1.0)

    def part(value):
        return value * settings.share

    def loss(model, x, y):
        return weight * SLOPE * loss_fn(model, x, y) * filled + part(model(x).pow(2).mean())

    pair = Pair(loss=lambda: loss)
    pair.train()
    settings.steps += 1
    filled.fill_(2.0)
    pair.train()
    assert pair.step.compilations == 1
    with pytest.warns(UserWarning, match=r"weight of loss was 0.5 and is 0.1.*weight.fill_"):
        weight = 0.1
        pair.train()
    with pytest.warns(UserWarning, match=r"share of settings was 0.3 and is 3.0"):
        settings.share = 3.0
        pair.train()
    with pytest.warns(UserWarning, match=r"filled of loss is another Tensor"):
        filled = torch.tensor(0.1)
        pair.train()
    assert pair.step.compilations == 4


def judges(count=2):
    """Equal modules with statistics and a layer of one element: what a loss reads from outside."""
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LeakyReLU(), nn.Linear(4, 1))
    return [copy.deepcopy(first) for _ in range(count)]


def judged_by(judge):
    return lambda model, x, y: F.softplus(-judge(model(x))).mean()


def test_a_module_outside_of_the_model(tmp_path):
    outside = judges()
    pair = Pair(lambda: nn.Linear(4, 3), iter([judged_by(judge) for judge in outside]).__next__)
    assert int(outside[0][1].num_batches_tracked) == 0, "compiling has changed a module that is not the model's"
    pair.train()
    for judge in outside:  # as another step would train it
        with torch.no_grad():
            for parameter in judge.parameters():
                parameter.mul_(1.5)
    pair.train()
    assert pair.step.compilations == 1
    pair.step.save(tmp_path / "judged.step")
    assert '"data"' not in (tmp_path / "judged.step").read_text(), "a file of a step holds no weights"
    pair.step = ws.load(tmp_path / "judged.step", pair.ours, pair.losses[0], pair.optimizers[0])
    for judge in outside:
        with torch.no_grad():
            judge[3].bias.add_(2.0)
    pair.train()
    with pytest.warns(UserWarning, match="training of .* was True and is False"):
        for judge in outside:
            judge.eval()
        pair.train()
    for a, b in zip(outside[0].state_dict().values(), outside[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_threads_that_compile_beside_each_other():
    made = []

    def compiled(number):
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(number / 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(ws.compile(model, loss_fn, optimizer, batch(), providers=["aten"]))

    threads = [threading.Thread(target=compiled, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3 and "__getattribute__" not in vars(nn.Module)
    for step in made:
        assert [r.value for r in step._compiled.reads.settings.values() if r.key == "p"] == [step.model[1].p]


def test_tensors_that_forward_changes_are_put_back_after_a_capture():
    count, history = torch.zeros(()), torch.zeros(3)

    def loss(model, x, y):
        count.add_(1)
        history.add_(1)
        return loss_fn(model, x, y)

    model = Scaled()
    step = ws.compile(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(), providers=["aten"])
    assert (float(count), history.tolist(), model.calls) == (0.0, [0.0] * 3, 0)
    step(*batch())
    assert (float(count), history.tolist()) == (1.0, [1.0] * 3)
