"""`CompiledTrainer`: a `transformers.Trainer` whose training step is one compiled program.

The Trainer keeps its loop, its callbacks, its evaluation and its checkpoints. Micro-batches are held back until the
last one of an update; then forward, loss, backward, clipping and update run at once. The Trainer's own clipping and
`optimizer.step` find no gradients to work on and are told so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer

from ..api import compile
from ..errors import InputError
from ..runtime.train_step import TrainStep

#: what a step keeps beside model and optimizer (random counters, loss scale, averages), in the Trainer's checkpoints
STATE_FILE = "wholestep.pt"


class WholestepMixin:
    """Put before a Trainer class: `class MyCompiledTrainer(WholestepMixin, MyTrainer)`.

    `compile_options` are passed on to `ws.compile` (`verify=True`, `ema=...`). Precision, clipping and accumulation
    come from the training arguments.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.compile_options = dict(compile_options or {})
        self._held: list[dict[str, Any]] = []  # micro-batches of the update to come
        self._steps: dict[Any, TrainStep] = {}
        self._last_step: TrainStep | None = None
        self._step_state: dict[str, Any] | None = None  # from a checkpoint, for the first step that is compiled
        check_trainer(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._held, self._step_state = [], None
        check_trainer(self)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._last_step is not None:
                self._last_step.flush()

    def training_step(
        self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Holds a micro-batch back or, with the last one of an update, runs the compiled step. Returns its loss."""
        model.train()
        self._held.append(dict(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        held, self._held = self._held, []
        with without_autocast(model):
            step, batch = self._step_for(model, held, num_items_in_batch)
            step(*batch)
        self.accelerator.gradient_state._set_sync_gradients(False)  # the update is done: optimizer.step has none to do
        if step.last.skipped is not None:  # the Trainer holds its schedule back for a skipped update
            self.optimizer._is_overflow = bool(step.last.skipped)
        return step.last.loss.detach().float()

    def _clip_grad_norm(self: Any, model: nn.Module) -> torch.Tensor | None:
        return None if self._last_step is None else self._last_step.last.grad_norm

    def _get_grad_norm(self: Any, model: nn.Module, grad_norm: Any = None) -> Any:
        """For the log: the norm the program computed, None where it clips nothing and needs none."""
        return self._clip_grad_norm(model)

    # ---- the compiled steps ------------------------------------------------------------------------------------------

    def _step_for(
        self: Any, model: nn.Module, held: list[dict[str, Any]], num_items: torch.Tensor | int | None
    ) -> tuple[TrainStep, tuple[dict[str, Any], ...]]:
        """The step for this group of micro-batches, compiled where it is new, and the batch in the form it takes.

        Micro-batches of one shape become one batch that the program splits again. Others (the last of a loader is
        smaller) are given side by side.
        """
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if any(s.model is not model or s.optimizer is not optimizer for s in self._steps.values()):
            self._steps, self._last_step = {}, None
        scaled = self._scales_loss(num_items)
        count = len(held)
        micros = [self._with_count(m, num_items) for m in held]
        together = count == 1 or can_join(micros)
        key = (count, together, scaled, tuple(held[0]))
        batch = (joined(micros),) if together else tuple(micros)
        if key not in self._steps:
            scale = count if together and scaled else 1 if scaled or together else 1 / count
            options = compile_options(self, count if together else 1)
            self._steps[key] = compile(model, self._loss_function(scale), optimizer, batch, **options)
        step = self._steps[key]
        self._hand_over(step)
        return step, batch

    def _scales_loss(self: Any, num_items: Any) -> bool:
        """Whether the loss is normalised over all micro-batches of an update, so that theirs add up to it."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        return (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None

    def _with_count(self: Any, micro: dict[str, Any], num_items: Any) -> dict[str, Any]:
        """The micro-batch with the number of items of the whole update beside it, once per sample as the rest."""
        if num_items is None:
            return micro
        rows = next((v.shape[0] for v in micro.values() if isinstance(v, torch.Tensor) and v.dim()), 1)
        count = torch.as_tensor(num_items, device=self.args.device)
        return {**micro, "num_items_in_batch": count.reshape(1).expand(rows)}

    def _loss_function(self: Any, scale: float) -> Any:
        """The Trainer's own `compute_loss` over micro-batches, their sum scaled."""

        def loss_fn(model: nn.Module, *micros: dict[str, Any]) -> torch.Tensor:
            losses = []
            for micro in micros:
                inputs = dict(micro)
                num_items = inputs.pop("num_items_in_batch", None)
                count = num_items[0] if num_items is not None else None
                losses.append(self.compute_loss(model, inputs, num_items_in_batch=count))
            total = sum(losses[1:], losses[0])
            return total if scale == 1 else total * scale

        return loss_fn

    def _hand_over(self: Any, step: TrainStep) -> None:
        """What the last step kept (random counters, loss scale) goes on in this one."""
        if step is self._last_step:
            return
        kept = self._step_state if self._last_step is None else own_state(self._last_step)
        if kept is not None:
            step.load_state_dict({**kept, "model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()})
        self._last_step, self._step_state = step, None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self._last_step is not None:
            torch.save(own_state(self._last_step), os.path.join(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        path = os.path.join(checkpoint, STATE_FILE) if checkpoint is not None else ""
        if os.path.isfile(path):  # a checkpoint of an uncompiled Trainer has none and resumes as well
            self._step_state = torch.load(path, map_location="cpu", weights_only=True)
            self._last_step = None


class CompiledTrainer(WholestepMixin, Trainer):
    """`transformers.Trainer` with the training step compiled."""


def own_state(step: TrainStep) -> dict[str, Any]:
    """What a step keeps that neither the model nor the optimizer holds."""
    return {k: v for k, v in step.state_dict().items() if k not in ("model", "optimizer")}


def compile_options(trainer: Any, accumulate: int) -> dict[str, Any]:
    """The options of `ws.compile` that the training arguments ask for, and the user's on top."""
    args = trainer.args
    options: dict[str, Any] = {"shapes": "bucket", "accumulate": accumulate}
    if args.max_grad_norm is not None and args.max_grad_norm > 0:
        options["clip_norm"] = args.max_grad_norm
    if args.bf16 or args.fp16:
        options["precision"] = "bf16" if args.bf16 else "fp16"
    return options | trainer.compile_options


def can_join(micros: list[dict[str, Any]]) -> bool:
    """Whether micro-batches are alike and have a row per sample, so that one batch can hold them and be split again."""
    kinds = [{k: (v.shape, v.dtype) for k, v in m.items() if isinstance(v, torch.Tensor) and v.dim()} for m in micros]
    rows = {shape[0] for shape, _ in kinds[0].values()}
    return len(kinds[0]) == len(micros[0]) and len(rows) == 1 and all(kind == kinds[0] for kind in kinds)


def joined(micros: list[dict[str, Any]]) -> dict[str, Any]:
    """Micro-batches behind each other."""
    return micros[0] if len(micros) == 1 else {k: torch.cat([m[k] for m in micros]) for k in micros[0]}


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """The model's forward as it was before Accelerate wrapped it in autocast: the program decides about precision."""
    wrapped = vars(model).get("forward")
    if wrapped is None or not hasattr(model, "_original_forward"):
        yield
        return
    model.forward = model._original_forward
    try:
        yield
    finally:
        model.forward = wrapped


def check_trainer(trainer: Any) -> None:
    """Refuses what a single compiled step on one device cannot do."""
    args = trainer.args
    if not (hasattr(Trainer, "_clip_grad_norm") and hasattr(Trainer, "_get_grad_norm")):
        raise InputError(
            f"CompiledTrainer does not know the loop of transformers {transformers.__version__}: try 5.17 or newer"
        )
    behind = type(trainer).__mro__[type(trainer).__mro__.index(WholestepMixin) + 1 :]
    owner = next(c for c in behind if "training_step" in vars(c))
    if owner is not Trainer:
        raise InputError(
            f"{owner.__name__}.training_step would never run: the step is compiled from compute_loss; move what it "
            "does there or to a callback"
        )
    several = "one compiled step trains on one device: "
    refused = [
        (args.world_size > 1, several + "start one process, without torchrun or accelerate launch"),
        (args.n_gpu > 1, several + "hide the other GPUs (CUDA_VISIBLE_DEVICES=0), or the Trainer uses DataParallel"),
        (trainer.is_deepspeed_enabled, several + "leave deepspeed out"),
        (trainer.is_fsdp_enabled or bool(args.fsdp), several + "leave fsdp out"),
        (trainer.is_model_parallel, several + "load the model without device_map"),
        (args.torch_compile, "torch_compile=True and Wholestep both compile the model: leave torch_compile out"),
        (
            args.gradient_checkpointing,
            "gradient_checkpointing=True has no meaning in a compiled step, which decides itself: leave it out",
        ),
        (
            args.torch_empty_cache_steps is not None,
            "torch_empty_cache_steps has no place in a compiled step: leave it out",
        ),
    ]
    for found, message in refused:
        if found:
            raise InputError(message)
