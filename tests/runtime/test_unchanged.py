"""What a snapshot notices between two steps, and what it does not mistake for a change; in C++ and without."""

from __future__ import annotations

import copy
from operator import setitem

import pytest
import torch
from torch import nn

from wholestep.runtime import record as records
from wholestep.runtime.record import NativeRecord, PlainRecord, Subjects, record
from wholestep.runtime.unchanged import Snapshot
from wholestep.training.optimizers import plan_optimizer


@pytest.fixture(params=["C++", "C++ through torch", "Python"])
def walker(request, monkeypatch):
    """Who looks at everything."""
    if request.param == "Python":
        monkeypatch.setattr(records, "native", lambda: "there is no compiler")
    elif isinstance(found := records.native(), str):
        pytest.skip(found)
    elif request.param == "C++ through torch":
        walker = found._replace(places=records.Places(), watch=None)
        monkeypatch.setattr(records, "native", lambda: walker)
    return PlainRecord if request.param == "Python" else NativeRecord


class Parts:
    """A model that has trained one eager step, and its snapshot."""

    def __init__(self, lr: float | torch.Tensor = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()
        plan = plan_optimizer(self.optimizer, dict(self.model.named_parameters()))
        self.snapshot = Snapshot([self.model], self.optimizer, plan, ["lr"])
        self.state = self.optimizer.state[self.model[0].weight]


def replace(table: dict, key: str) -> None:
    """An equal tensor, but another one."""
    old = table[key]
    table[key] = nn.Parameter(old.detach().clone()) if isinstance(old, nn.Parameter) else old.clone()


def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


CHANGES = {
    "mode": lambda p: p.model[1].eval(),
    "frozen": lambda p: p.model[0].requires_grad_(False),
    "parameter": lambda p: replace(p.model[0]._parameters, "weight"),
    "buffer of one element": lambda p: replace(p.model[1]._buffers, "num_batches_tracked"),
    "parameter removed": lambda p: p.model[0]._parameters.__setitem__("bias", None),
    "new in an empty table": lambda p: p.model[0].register_buffer("more", torch.zeros(1)),
    "child": lambda p: p.model._modules.__setitem__("2", nn.Linear(4, 1)),
    "moved": lambda p: assign(p.model[0].weight, p.model[0].weight.data.clone()),
    "exchanged": lambda p: torch.utils.swap_tensors(p.model[0].weight, nn.Parameter(torch.ones(4, 4))),
    "laid otherwise": lambda p: assign(p.model[0].weight, p.model[0].weight.data.t()),
    "storage moved": lambda p: p.model[0].weight.untyped_storage().resize_(1 << 20),
    "other storage": lambda p: p.state["exp_avg"].set_(torch.ones(4, 4)),
    "other place": lambda p: assign(p.state["exp_avg"], p.state["exp_avg"].data.as_strided((3, 4), (4, 1), 4)),
    "more dimensions": lambda p: assign(p.state["exp_avg"], p.state["exp_avg"].data.unsqueeze(-1)),
    "vector at another place": lambda p: assign(p.model[0].bias, p.model[0].bias.data[1:]),
    "state moved": lambda p: assign(p.state["exp_avg"], p.state["exp_avg"].clone()),
    "state laid otherwise": lambda p: assign(p.state["exp_avg"], p.state["exp_avg"].data.t()),
    "counter replaced": lambda p: replace(p.state, "step"),
    "state replaced": lambda p: p.optimizer.load_state_dict(copy.deepcopy(p.optimizer.state_dict())),
    "state gone": lambda p: p.optimizer.state.clear(),
    "other state": lambda p: setattr(p.optimizer, "state", copy.copy(p.optimizer.state)),
    "other groups": lambda p: setattr(p.optimizer, "param_groups", copy.copy(p.optimizer.param_groups)),
    "other list": lambda p: p.optimizer.param_groups[0].__setitem__(
        "params", p.optimizer.param_groups[0]["params"][1:]
    ),
    "group added": lambda p: p.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "group grows": lambda p: p.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))),
    "parameter swapped": lambda p: p.optimizer.param_groups[0]["params"].reverse(),
    "option": lambda p: p.optimizer.param_groups[0].__setitem__("amsgrad", True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed(what, walker):
    parts = Parts()
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    CHANGES[what](parts)
    assert not parts.snapshot.holds()


def test_values_and_learning_rates_may_change(walker):
    parts = Parts()
    with torch.no_grad():
        parts.model[0].weight.mul_(2)
        parts.state["step"].add_(1)
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    parts.optimizer.param_groups[0]["lr"] = 0.05
    assert parts.snapshot.holds() and not parts.snapshot.same_groups
    assert parts.snapshot.holds() and not parts.snapshot.same_groups  # nobody has read it yet
    parts.snapshot.keep_groups()
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    parts.optimizer.param_groups[0]["amsgrad"] = True
    assert not parts.snapshot.holds()


def test_a_hyper_parameter_that_can_change_inside_is_read_every_time():
    parts = Parts(torch.tensor(0.1))
    parts.optimizer.param_groups[0]["lr"].fill_(0.2)
    assert parts.snapshot.holds() and not parts.snapshot.same_groups


def test_attributes_and_modes_may_be_set_to_what_they_are(walker):
    parts = Parts()
    parts.model[0].note = "a user's own"
    parts.model.train()
    parts.optimizer.param_groups[0]["lr"] = float("0.1")
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    parts.model.train()
    parts.model[2].training = False
    assert not parts.snapshot.holds()


def test_writes_are_counted(walker):
    tensors = [torch.zeros(2), nn.Parameter(torch.zeros(3, 2))]
    counted = record(Subjects(counted=tensors))
    assert type(counted) is walker and counted.same()
    tensors[1].data.add_(1)
    assert counted.same()
    with torch.no_grad():
        tensors[1].add_(1)
    assert not counted.same()
    counted.keep()
    assert counted.same()


def test_a_record_holds_what_it_is_of(walker):
    """What has gone from the user's list is still looked at, and is not somebody else's memory."""
    tables, lists = [{"a": object()}], [[object()]]
    kept = record(Subjects(tables=tables, lists=lists))
    tables.clear()
    lists[0][0] = object()
    assert not kept.same()
    kept.keep()
    assert kept.same()
    lists[0].append(object())
    assert not kept.same()


def test_a_table_that_grows_is_noticed_wherever_it_is(walker):
    tables = [{}, {"a": 1}, {}]
    for table in tables:
        kept = record(Subjects(tables=tables))
        assert kept.same()
        table["more"] = None
        assert not kept.same()
        kept.keep()
        assert kept.same()
        del table["more"]
        assert not kept.same()


def test_a_tensor_of_many_dimensions_is_looked_at(walker):
    tensor = torch.zeros(2, 2, 2, 2, 2, 2, 2)
    kept = record(Subjects(laid=[tensor]))
    assert kept.same()
    tensor.data = tensor.data.transpose(0, 6)
    assert not kept.same()


def test_training_is_looked_at_however_it_comes(walker):
    plain, known, trained = torch.zeros(2), torch.zeros(2, requires_grad=True).requires_grad_(False), torch.zeros(2)
    kept = record(Subjects(trained=[plain, known, trained.requires_grad_()]))
    assert kept.same()
    for tensor in (plain, known):
        tensor.add_(trained)  # a result of autograd from now on, which no flag says
        assert not kept.same()
        kept.keep()
        assert kept.same()
    trained.requires_grad_(False)
    assert not kept.same()


def test_quiet_tables_are_told_apart(walker):
    """Python tells that some table has changed; which records that concerns is looked up."""
    one, other = [{"a": 1}, {}], [{"b": 1}]
    kept = [record(Subjects(tagged=tables, quiet=True)) for tables in (one, other)]
    if walker is PlainRecord:
        assert not kept[0].same()  # there Python does not count changes: the slow look decides
        return
    assert kept[0].same() and kept[1].same()
    for change in (lambda: one[1].update(c=1), lambda: one[0].pop("a"), one[1].clear, lambda: setitem(one[0], "a", 1)):
        change()
        assert [k.same() for k in kept] == [False, True] == [k.same() for k in kept]
        kept[0].keep()
        assert kept[0].same()


def test_a_tensor_that_cannot_be_read_is_never_the_same():
    if isinstance(why := records.native(), str):
        pytest.skip(why)
    assert record(Subjects(placed=[torch.eye(2)])).same()
    assert not record(Subjects(placed=[torch.eye(2).to_sparse()])).same()
