"""Optimizers as users write them: copied idioms, none of them ours."""

from __future__ import annotations

import math
from math import sqrt

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Signs of an interpolated momentum (lucidrains' and Google's code)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                grad = p.grad
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                beta1, beta2 = group["betas"]
                update = exp_avg * beta1 + grad * (1 - beta1)
                p.add_(torch.sign(update), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss


class Lamb(Optimizer):
    """Layer-wise trust ratio, with the branch on tensors of the common implementations."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, clamp=10.0, debias=True):
        self.clamp_value = clamp
        self.debias = debias
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                if grad.is_sparse:
                    raise RuntimeError("Lamb does not support sparse gradients")
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                if self.debias:
                    bias_correction = math.sqrt(1 - beta2 ** state["step"])
                    bias_correction /= 1 - beta1 ** state["step"]
                else:
                    bias_correction = 1
                step_size = group["lr"] * bias_correction
                weight_norm = torch.norm(p.data).clamp(0, self.clamp_value)
                adam_step = exp_avg / exp_avg_sq.sqrt().add(group["eps"])
                if group["weight_decay"] != 0:
                    adam_step.add_(p.data, alpha=group["weight_decay"])
                adam_norm = torch.norm(adam_step)
                if weight_norm == 0 or adam_norm == 0:
                    trust_ratio = 1
                else:
                    trust_ratio = weight_norm / adam_norm
                state["weight_norm"] = weight_norm
                p.data.add_(adam_step * trust_ratio, alpha=-step_size)


class PlainAdam(Optimizer):
    """Adam with an int step and `value=-step_size`, warming up over the first steps."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup=3):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup=warmup))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                if group["weight_decay"] != 0:
                    grad = grad.add(p.data, alpha=group["weight_decay"])
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                correction = sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                step_size = group["lr"] * correction
                if state["step"] < group["warmup"]:
                    step_size = step_size * state["step"] / group["warmup"]
                p.data.addcdiv_(exp_avg, denom, value=-step_size)


class FirstGradient(Optimizer):
    """Momentum that starts as a copy of the first gradient, dampened afterwards; counts steps in the group."""

    def __init__(self, params, lr=0.1, momentum=0.9, dampening=0.5):
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, steps=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    buffer = state["buffer"] = torch.clone(p.grad).detach()
                else:
                    buffer = state["buffer"]
                    buffer.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["dampening"])
                p.add_(buffer, alpha=-group["lr"] / group["steps"] ** 0.5)


class TensorStep(Optimizer):
    """Keeps its step as a tensor and reads it with item(); switches on when enough gradients were seen."""

    def __init__(self, params, lr=1e-2, beta=0.9, eps=1e-8):
        super().__init__(params, dict(lr=lr, beta=beta, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["slow"] = p.detach().clone()
                    state["sq"] = torch.full_like(p, 0.1)
                state["step"] += 1
                step = state["step"].item()
                state["sq"] = state["sq"].lerp(p.grad.square(), 1 - group["beta"])
                hat = state["sq"] / (1 - group["beta"] ** step)
                if step > 2:
                    update = p.grad / (hat.sqrt() + group["eps"])
                else:
                    update = p.grad
                p.sub_(group["lr"] * update)
                state["slow"].lerp_(p, 0.5)


class GlobalNorm(Optimizer):
    """Normalises by the norm over all parameters: no update of its own per parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            total = sum(p.grad.pow(2).sum() for p in group["params"]).sqrt()
            for p in group["params"]:
                p.add_(p.grad / total, alpha=-group["lr"])


class Listed(Optimizer):
    """Asks Python for the values of a tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                largest = max(p.grad.flatten().tolist())
                p.add_(p.grad, alpha=-group["lr"] / largest)


class Foreach(Optimizer):
    """Updates all parameters at once through foreach calls."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-group["lr"])


class NeedsClosure(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    def step(self, closure):
        return closure()


class EveryStepBranch(Optimizer):
    """Branches on a number that is different in every step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                for _ in range(state["step"]):
                    p.add_(p.grad, alpha=-group["lr"])


class MyAdam(torch.optim.Adam):
    """A subclass with a step of its own: plain descent, whatever its name says."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])
