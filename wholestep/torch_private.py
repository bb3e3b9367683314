"""Every private torch API that Wholestep touches, each behind one small function: a new torch is this file's work."""

from __future__ import annotations

from typing import Any

import torch


def optimizer_step_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the hooks that run around `optimizer.step`: the optimizer's own and those for all optimizers."""
    from torch.optim import optimizer as module

    registries: list[Any] = [
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        getattr(module, "_global_optimizer_pre_hooks", None),
        getattr(module, "_global_optimizer_post_hooks", None),
    ]
    return [getattr(h, "__name__", type(h).__name__) for hooks in registries if hooks for h in hooks.values()]
