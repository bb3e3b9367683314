"""The protocol of transformations, and `recompute` on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh, squares
from wholestep.errors import InputError, WholestepError
from wholestep.transforms.opportunity import (
    Change,
    Opportunity,
    Transformation,
    apply_key,
    by_transformation,
    fewest_bytes,
    forget_transformation,
    opportunities,
    register_policy,
    register_transformation,
    sites,
    sites_text,
    transform,
    transformations,
    whatever,
)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def run(**options):
    net = fresh(model)
    torch.manual_seed(11)
    step = ws.compile(net, squares, adamw(net), (data(6, 4),), **options)
    losses = [float(step(data(6, 4, seed=s))) for s in range(3)]
    return step, losses, [p.detach().clone() for p in net.parameters()]


def kept(module) -> set:
    """Values that forward makes and a later phase reads."""
    early = ("forward", "loss")
    return {
        v for op in sites(module).values() if op.phase not in early for v in op.operands if v.op and v.op.phase in early
    }


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"accumulate": 2}], ids=str)
def test_recomputing_everything_changes_no_bit(options):
    plain, losses, parameters = run(**options)
    again, other_losses, other = run(force=["recompute *"], **options)
    assert losses == other_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, other, strict=True))
    assert len(again.recipe) >= 4 and "again = true" in str(again.program())
    assert len(kept(again.program())) < len(kept(plain.program()))


def test_the_predicted_saving_is_what_is_kept_less():
    plain, _, _ = run()
    made = [o for o in plain.opportunities() if not o.why_not and o.change.saved < 0]
    assert {o.site.split("/")[3].partition("#")[0] for o in made} >= {"contract", "gelu", "layer_norm"}
    for opportunity in made:
        module = plain.program().clone()
        apply_key(module, opportunity.key)
        difference = sum(v.type.bytes for v in kept(module) if v.op.operands)
        difference -= sum(v.type.bytes for v in kept(plain.program()) if v.op.operands)
        assert difference == opportunity.change.saved, opportunity
        (copy_of,) = [op for op in sites(module).values() if op.attributes.get("again")]
        assert opportunity.change.flops == copy_of.definition.flops(copy_of)


def test_a_chain_is_recomputed_from_its_own_copies():
    step, _, _ = run(force=["recompute */gelu#*", "recompute */layer_norm#*"])
    copies = [op for op in sites(step.program()).values() if op.attributes.get("again")]
    norm = next(op for op in copies if op.name == "step.layer_norm")
    assert norm.operands[0].op.attributes.get("again") is True
    assert norm.operands[0] not in kept(step.program())


def test_a_recipe_replays_and_is_saved(tmp_path):
    step, losses, _ = run(force=["recompute */gelu#*"])
    assert step.recipe == ["recompute step/1/forward/gelu#0"]
    again, other, _ = run(recipe=step.recipe)
    assert again.recipe == step.recipe and losses == other
    step.save(tmp_path / "a.step")
    twin = fresh(model)
    loaded = ws.load(tmp_path / "a.step", twin, squares, adamw(twin))
    assert loaded.recipe == step.recipe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"force": ["recompute */softmax#*"]}, "fits no opportunity"),
        (
            {"forbid": ["recompute */sotfmax#*"]},
            "forbid names 'recompute .*' which fits no opportunity".replace("'", "."),
        ),
        ({"recipe": ["recompute step/1/forward/gelu#7"]}, "did you mean 'recompute step/1/forward/gelu#0'?"),
        ({"recipe": ["rekompute step/1/forward/gelu#0"]}, "there is no transformation 'rekompute'"),
        ({"force": "recompute *"}, "force is a list of keys"),
        ({"force": [3]}, "force is a list of keys"),
    ],
)
def test_what_does_not_fit_is_an_error(options, message):
    net = fresh(model)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match=message.replace("?", r"\?").replace("(", r"\(")):
        ws.compile(net, squares, adamw(net), (data(6, 4),), **options)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_what_is_given_back_is_kept_anyway():
    net = fresh(model)

    def loss_and_rows(m, x):
        rows = m(x)
        return rows.pow(2).mean(), rows

    step = ws.compile(net, loss_and_rows, adamw(net), (data(6, 4),))
    reasons = {o.why_not for o in step.opportunities()}
    assert "the step gives it back, so it is kept anyway" in reasons


class Rename(Transformation):
    """Does nothing but count; says that it saves bytes, once."""

    name, level = "count", 2

    def find(self, module):
        return [
            Opportunity(
                "count", site, Change(bytes=-op.result.type.size), "" if "again" not in op.attributes else "done"
            )
            for site, op in sites(module).items()
            if op.name == "step.gelu"
        ]

    def apply(self, op):
        op.attributes["again"] = True


@pytest.fixture
def counting():
    register_transformation(Rename)
    yield
    forget_transformation("count")


def test_a_transformation_of_a_users_own(counting):
    step, _, _ = run(force=["count *"])
    assert step.recipe == ["count step/1/forward/gelu#0"]
    assert [o.why_not for o in step.opportunities() if o.transformation == "count"] == ["done"]
    with pytest.raises(InputError, match="'count step/1/forward/gelu#0' is not possible: done"):
        transform(step.program(), force=["count *"])


def test_policies_pick_until_nothing_is_left_and_respect_forbid(counting, monkeypatch):
    step, _, _ = run()
    module = step.program().clone()
    with monkeypatch.context() as patched:  # one that wants a single transformation asks no other
        for other in transformations().values():
            if other.name != "count":
                patched.setattr(type(other), "find", lambda self, module: pytest.fail(f"{self.name} was asked"))
        assert transform(module.clone(), whatever("count")) == ["count step/1/forward/gelu#0"]
        assert transform(module.clone(), whatever("count"), levels=[4]) == []
    assert transform(module, fewest_bytes, forbid=["count *"]) == []
    assert transform(module, fewest_bytes) == ["count step/1/forward/gelu#0"]
    assert all(o.why_not for o in opportunities(module) if o.transformation == "count")


def test_numerics_changing_transformations_are_never_picked(counting, monkeypatch):
    monkeypatch.setattr(Rename, "keeps_numerics", False)
    step, _, _ = run()
    assert transform(step.program().clone(), fewest_bytes) == []


def test_a_policy_of_a_user_is_asked_until_it_picks_nothing():
    seen: list[str] = []

    @register_policy
    def norms_again(found):
        seen.extend(o.transformation for o in found)
        return next((o for o in found if o.key.startswith("recompute ") and "/layer_norm#" in o.site), None)

    plain, losses, _ = run()
    step, other, _ = run(policy="norms_again")
    assert step.recipe == [*plain.recipe, "recompute step/2/forward/layer_norm#0"] and losses == other
    assert "side-updates" not in seen and "offload" not in seen  # of no use on a CPU, and of a higher level
    assert run(policy="norms_again", forbid=["recompute *"])[0].recipe == plain.recipe
    assert run(policy="norms_again", level=2)[0].recipe == plain.recipe

    @register_policy
    def picks_what_is_not_there(found):
        return Opportunity("recompute", "step/9/forward/gelu#0")

    for name, message in (
        ("norms_agian", "there is no policy 'norms_agian'.*did you mean 'norms_again'"),
        ("picks_what_is_not_there", "picks one of the opportunities that it is given"),
    ):
        with pytest.raises(InputError, match=message):
            run(policy=name)
    with pytest.raises(InputError, match="level=0 takes none"):
        run(policy="norms_again", level=0)


@pytest.mark.parametrize("option", ["force", "forbid"])
def test_a_misspelt_transformation_is_told_of(option):
    with pytest.raises(InputError, match=r"fits no opportunity.*did you mean 'recompute'"):
        run(**{option: ["recompte */gelu#*"]})


class Broken(Transformation):
    """Fails where it is told to."""

    name, level, fails = "broken", 1, "places"

    def places(self, function):
        if self.fails == "places":
            raise KeyError("inside")
        yield from ((op, Change(bytes=-1)) for op in function.regions[0].block if op.name == "step.gelu")

    def apply(self, op):
        raise AttributeError("no such thing")


@pytest.fixture
def broken():
    yield register_transformation(Broken)
    forget_transformation("broken")


def test_a_transformation_that_fails_is_named(broken, monkeypatch):
    step, _, _ = run(force=["recompute */gelu#*"], forbid=["recompute */tanh#*"])  # nobody need ask it
    assert step.recipe == ["recompute step/1/forward/gelu#0"]
    failed = (
        r"'broken' failed while it looked for opportunities: KeyError: 'inside'.\nTry: correct Broken.places.*forget"
    )
    for ask in (step.opportunities, lambda: run(force=["*/gelu#*"]), lambda: run(force=["broken *"])):
        with pytest.raises(WholestepError, match=failed):
            ask()
    monkeypatch.setattr(Broken, "fails", "apply")
    with pytest.raises(WholestepError, match=r"'broken' failed while it was applied at step/1/forward/gelu#0: Attr"):
        run(force=["broken *"])


def test_a_recipe_by_transformation():
    recipe = ["fuse a#0 + b#0 + c#0", "recompute a#1", "fuse d#0", "recompute a#0", "fuse e#0", "fuse f#0"]
    found = by_transformation(recipe)
    assert found == {"fuse": ["a#0 + b#0 + c#0", "d#0", "e#0", "f#0"], "recompute": ["a#1", "a#0"]}
    assert sites_text(found["fuse"]) == "a#0 + 2 more, d#0, e#0, ..." and sites_text(found["recompute"]) == "a#1, a#0"
