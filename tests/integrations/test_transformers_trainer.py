"""The real `transformers.Trainer`, compiled and not: the same losses, norms, rates and weights, also after a resume."""

from __future__ import annotations

import shutil

import pytest
import torch

from wholestep.errors import InputError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from wholestep.integrations.transformers import STATE_FILE, CompiledTrainer, WholestepMixin  # noqa: E402

torch.set_num_threads(1)


def gpt2(dropout: float = 0.0):
    torch.manual_seed(0)
    rates = {f"{kind}_pdrop": dropout for kind in ("resid", "embd", "attn")}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=16, **rates)
    )


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting sequences, so that there is something to learn; some positions carry no label."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randint(0, 40, (count, 1), generator=generator) + torch.arange(8)) % 40
    labels = rows.masked_fill(torch.rand(rows.shape, generator=generator) < 0.2, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def arguments(path, **changes) -> transformers.TrainingArguments:
    defaults = {
        "output_dir": str(path), "use_cpu": True, "max_steps": 20, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 4, "max_grad_norm": 1.0,
        "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch", "weight_decay": 0.1,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**defaults | changes)


def trained(kind, path, model=None, data=None, resume=None, options=None, **changes):
    more = {"compile_options": options} if options else {}
    trainer = kind(
        model=model if model is not None else gpt2(),
        args=arguments(path, **changes),
        train_dataset=texts(40) if data is None else data,
        eval_dataset=texts(6),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def curve(trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_same(ours, theirs, steps: int = 20):
    assert len(curve(theirs)) == steps
    for key in ("loss", "grad_norm", "learning_rate"):
        torch.testing.assert_close(
            curve(ours, key), curve(theirs, key), rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        if name.endswith(
            "c_attn.bias"
        ):  # softmax ignores the keys' bias: its gradient is rounding, which AdamW inflates
            a, b = (torch.cat((t[:16], t[32:])) for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_trains_like_the_uncompiled_trainer(tmp_path):
    theirs = trained(transformers.Trainer, tmp_path)
    ours = trained(CompiledTrainer, tmp_path)
    assert_same(ours, theirs)
    assert (
        curve(ours)[-1] < 0.9 * curve(ours)[0] and max(curve(ours, "grad_norm")) > 1.0
    )  # it learns, and it is clipped
    assert ours._last_step.compilations == 1 and len(ours._steps) == 1
    assert all(p.grad is None for p in ours.model.parameters())


def test_accumulation(tmp_path):
    """Two micro-batches per update, and one left over at the end of an epoch (the 40 samples are 5 times 8)."""
    changes = {"gradient_accumulation_steps": 2, "max_steps": 8, "per_device_train_batch_size": 8}
    theirs = trained(transformers.Trainer, tmp_path, **changes)
    ours = trained(CompiledTrainer, tmp_path, **changes)
    assert_same(ours, theirs, steps=8)
    assert sorted(key[0] for key in ours._steps) == [1, 2]


def test_evaluation_in_between(tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 7}
    theirs, ours = (trained(kind, tmp_path, **changes) for kind in (transformers.Trainer, CompiledTrainer))
    assert_same(ours, theirs, steps=7)
    assert len(curve(ours, "eval_loss")) == 3  # the Trainer also evaluates at the end
    torch.testing.assert_close(curve(ours, "eval_loss"), curve(theirs, "eval_loss"), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.evaluate()["eval_loss"], theirs.evaluate()["eval_loss"], rtol=1e-4, atol=1e-5)
    assert ours._last_step.compilations == 1


def test_a_checkpoint_resumes_to_the_same_curve(tmp_path):
    dropout = 0.3  # the masks go on where they were
    changes = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = trained(CompiledTrainer, tmp_path, gpt2(dropout), **changes)
    assert (tmp_path / "checkpoint-4" / STATE_FILE).exists()
    rest = trained(CompiledTrainer, tmp_path, gpt2(dropout), resume=str(tmp_path / "checkpoint-4"), **changes)
    assert curve(rest) == curve(whole)  # the first four come from the checkpoint
    for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", ["compiled", "uncompiled"])
def test_a_checkpoint_goes_on_in_the_other_trainer(tmp_path, first):
    kinds = [CompiledTrainer, transformers.Trainer][:: 1 if first == "compiled" else -1]
    changes = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    trained(kinds[0], tmp_path, **changes)
    shutil.rmtree(tmp_path / "checkpoint-8")
    rest = trained(kinds[1], tmp_path, resume=True, **changes)
    assert_same(rest, trained(transformers.Trainer, tmp_path / "whole", **changes), steps=8)


def test_label_smoothing_and_a_loss_of_the_users(tmp_path):
    changes = {"label_smoothing_factor": 0.1, "max_steps": 5}
    assert_same(*(trained(kind, tmp_path, **changes) for kind in (CompiledTrainer, transformers.Trainer)), steps=5)

    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss + 0.01 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    class CompiledWeighted(WholestepMixin, Weighted):
        pass

    theirs = trained(Weighted, tmp_path, max_steps=5)
    assert_same(trained(CompiledWeighted, tmp_path, max_steps=5), theirs, steps=5)


def test_no_clipping_and_options_of_compile(tmp_path):
    theirs = trained(transformers.Trainer, tmp_path, max_grad_norm=0.0, max_steps=3)
    ours = trained(CompiledTrainer, tmp_path, max_grad_norm=0.0, max_steps=3, options={"verify": True})
    torch.testing.assert_close(curve(ours), curve(theirs), rtol=1e-4, atol=1e-5)
    assert ours._last_step.verified and not curve(ours, "grad_norm")  # nothing needs the norm: it is not computed


def test_updates_in_the_next_forward(tmp_path):
    """Evaluation, checkpoints, micro-batches of other sizes and the end of training find the model up to date."""
    changes = {
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 4, "max_steps": 8,
        "gradient_accumulation_steps": 2, "data": texts(14),
    }  # fmt: skip
    theirs = trained(transformers.Trainer, tmp_path / "theirs", **changes)
    late = {"options": {"updates": "in_next_forward"}}
    ours = trained(CompiledTrainer, tmp_path / "ours", **changes, **late)
    assert_same(ours, theirs, steps=8)
    torch.testing.assert_close(curve(ours, "eval_loss"), curve(theirs, "eval_loss"), rtol=1e-4, atol=1e-5)
    resume = str(tmp_path / "ours" / "checkpoint-4")
    assert_same(trained(CompiledTrainer, tmp_path / "ours", resume=resume, **changes, **late), theirs, steps=8)


def test_without_drop_last_a_smaller_batch(tmp_path):
    changes = {"max_steps": 6, "data": texts(10)}  # the last batch of an epoch has 2 samples
    ours, theirs = (trained(kind, tmp_path, **changes) for kind in (CompiledTrainer, transformers.Trainer))
    assert_same(ours, theirs, steps=6)
    assert ours._last_step.compilations == 2


def test_a_smaller_micro_batch_within_an_update(tmp_path):
    changes = {"max_steps": 4, "data": texts(14), "gradient_accumulation_steps": 2}  # 4 + 4, then 4 + 2
    assert_same(*(trained(kind, tmp_path, **changes) for kind in (CompiledTrainer, transformers.Trainer)), steps=4)


def test_bf16_tracks_autocast(tmp_path):
    theirs, ours = (
        trained(kind, tmp_path, bf16=True, max_steps=10) for kind in (transformers.Trainer, CompiledTrainer)
    )
    torch.testing.assert_close(curve(ours), curve(theirs), rtol=2e-2, atol=2e-2)
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=2e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu(tmp_path, precision):
    changes = {"use_cpu": False, "max_steps": 12, "gradient_accumulation_steps": 2} | {precision: True}
    changes.pop("fp32", None)
    theirs, ours = (trained(kind, tmp_path, **changes) for kind in (transformers.Trainer, CompiledTrainer))
    tolerance = 1e-3 if precision == "fp32" else 3e-2
    torch.testing.assert_close(curve(ours), curve(theirs), rtol=tolerance, atol=tolerance)
    assert curve(ours, "learning_rate") == curve(theirs, "learning_rate")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile": True}, "leave torch_compile out"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"torch_empty_cache_steps": 5}, "torch_empty_cache_steps"),
    ],
)
def test_refusals(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        trained(CompiledTrainer, tmp_path, **changes)


def test_a_training_step_of_the_users_is_refused(tmp_path):
    class Own(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class CompiledOwn(WholestepMixin, Own):
        pass

    with pytest.raises(InputError, match=r"Own.training_step would never run"):
        trained(CompiledOwn, tmp_path)


def test_a_training_step_around_the_compiled_one_is_fine(tmp_path):
    class Counting(CompiledTrainer):
        calls = 0

        def training_step(self, *args, **kwargs):
            self.calls += 1
            return super().training_step(*args, **kwargs)

    assert trained(Counting, tmp_path, max_steps=2).calls == 2
