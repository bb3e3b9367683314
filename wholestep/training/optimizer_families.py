"""What each `torch.optim` class keeps and reads: its op, its state as created on the first step, its hyper-parameters.

The values of state, dtypes and devices mirror each class's `_init_group`, so that checkpoints are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Group = dict[str, Any]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: the op's operand, and the key (and index) in the param group it is read from."""

    operand: str
    key: str
    index: int | None = None


@dataclass(frozen=True)
class Family:
    """One optimizer family. The callables see the param group as it is now."""

    op: str
    hypers: Callable[[Group], list[Hyper]]
    initial: Callable[[torch.Tensor, Group, torch.optim.Optimizer], State]
    options: Callable[[Group], dict[str, Any]]
    #: state that may be absent though the parameter has other state; elsewhere eager raises KeyError
    lazy: frozenset[str] = frozenset()
    #: state key by operand name, where they differ
    keys: dict[str, str] = field(default_factory=dict)
    #: whether the op asks if this is the parameter's first update
    fresh: Callable[[Group], bool] = lambda group: False


def hypers(*names: str | tuple[str, str, int]) -> Callable[[Group], list[Hyper]]:
    """Hyper-parameters under the same name, or (operand, key, index)."""
    listed = [Hyper(n, n) if isinstance(n, str) else Hyper(*n) for n in names]
    return lambda group: listed


BETAS = (("beta1", "betas", 0), ("beta2", "betas", 1))


def number(value: Any) -> float:
    """A hyper-parameter that may be a tensor, as a Python number."""
    return float(value)


def scalar(parameter: torch.Tensor, value: float, on_device: bool = False, fused: bool = False) -> torch.Tensor:
    """A 0-d state: on the CPU unless eager keeps it beside the parameter; f64 only where that is the default dtype."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32
    return torch.full((), value, dtype=dtype, device=parameter.device if on_device else "cpu")


def like(parameter: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """State of the parameter's shape, dtype, device and layout."""
    return torch.full_like(parameter, value, memory_format=torch.preserve_format, requires_grad=False)


def counter(parameter: torch.Tensor, group: Group) -> torch.Tensor:
    """`step`: beside the parameter for capturable and fused optimizers, else on the CPU."""
    fused = bool(group.get("fused"))
    return scalar(parameter, 0.0, bool(group.get("capturable")) or fused, fused)


def _sgd(parameter, group, optimizer):
    return {"momentum_buffer": like(parameter)} if group["momentum"] != 0 else {}


def _adam(parameter, group, optimizer):
    state = {"step": counter(parameter, group), "exp_avg": like(parameter), "exp_avg_sq": like(parameter)}
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = like(parameter)
    return state


def _adamax(parameter, group, optimizer):
    return {"step": counter(parameter, group), "exp_avg": like(parameter), "exp_inf": like(parameter)}


def _nadam(parameter, group, optimizer):
    return {
        "step": counter(parameter, group),
        "mu_product": scalar(parameter, 1.0, group["capturable"]),
        "exp_avg": like(parameter),
        "exp_avg_sq": like(parameter),
    }


def _radam(parameter, group, optimizer):
    return {"step": counter(parameter, group), "exp_avg": like(parameter), "exp_avg_sq": like(parameter)}


def _rmsprop(parameter, group, optimizer):
    state = {"step": counter(parameter, group), "square_avg": like(parameter)}
    if group["momentum"] > 0:
        state["momentum_buffer"] = like(parameter)
    if group["centered"]:
        state["grad_avg"] = like(parameter)
    return state


def _adagrad(parameter, group, optimizer):
    value = optimizer.defaults["initial_accumulator_value"]
    return {"step": counter(parameter, group), "sum": like(parameter, value)}


def _adadelta(parameter, group, optimizer):
    return {"step": counter(parameter, group), "square_avg": like(parameter), "acc_delta": like(parameter)}


def _adafactor(parameter, group, optimizer):
    state = {"step": counter(parameter, group)}
    if parameter.dim() > 1:
        shape = list(parameter.shape)
        state["row_var"] = parameter.detach().new_zeros([*shape[:-1], 1])
        state["col_var"] = parameter.detach().new_zeros([*shape[:-2], 1, shape[-1]])
    else:
        state["variance"] = like(parameter)
    return state


def _asgd(parameter, group, optimizer):
    return {
        "step": scalar(parameter, 0.0, True),
        "eta": scalar(parameter, number(group["lr"]), True),
        "mu": scalar(parameter, 1.0, True),
        "ax": like(parameter),
    }


def _rprop(parameter, group, optimizer):
    return {
        "step": counter(parameter, group),
        "prev": like(parameter),
        "step_size": like(parameter, number(group["lr"])),
    }


def _muon(parameter, group, optimizer):
    return {"momentum_buffer": like(parameter)}


def _maximize(group: Group) -> dict[str, Any]:
    return {"maximize": bool(group["maximize"])}


def _decoupled(group: Group) -> dict[str, Any]:
    return {"maximize": bool(group["maximize"]), "decoupled": bool(group.get("decoupled_weight_decay", False))}


def _with_momentum(group: Group) -> bool:
    return bool(group["momentum"] != 0)


def families() -> dict[type, Family]:
    """The families by `torch.optim` class; Muon where this torch has it."""
    optim = torch.optim
    plain, momentum = hypers("lr", "weight_decay"), hypers("lr", "weight_decay", "momentum", "dampening")
    rmsprop, rmsprop_momentum = (hypers("lr", "alpha", "eps", "weight_decay", *m) for m in ((), ("momentum",)))
    adafactor = (("eps2", "eps", 1), "d", "weight_decay")
    no_eps1 = hypers("lr", "beta2_decay", *adafactor)
    with_eps1 = hypers("lr", "beta2_decay", ("eps1", "eps", 0), *adafactor)
    adam = hypers("lr", *BETAS, "eps", "weight_decay")
    table: dict[type, Family] = {
        optim.SGD: Family(
            "sgd",
            lambda group: (momentum if _with_momentum(group) else plain)(group),
            _sgd,
            lambda group: {"nesterov": bool(group["nesterov"]), **_maximize(group)},
            lazy=frozenset({"momentum_buffer"}),
            fresh=_with_momentum,
        ),
        optim.Adam: Family("adam", adam, _adam, _decoupled),
        optim.Adamax: Family("adamax", adam, _adamax, _maximize),
        optim.NAdam: Family("nadam", hypers("lr", *BETAS, "eps", "weight_decay", "momentum_decay"), _nadam, _decoupled),
        optim.RAdam: Family("radam", adam, _radam, _decoupled),
        optim.RMSprop: Family(
            "rmsprop",
            lambda group: (rmsprop_momentum if group["momentum"] > 0 else rmsprop)(group),
            _rmsprop,
            _maximize,
        ),
        optim.Adagrad: Family("adagrad", hypers("lr", "lr_decay", "eps", "weight_decay"), _adagrad, _maximize),
        optim.Adadelta: Family("adadelta", hypers("lr", "rho", "eps", "weight_decay"), _adadelta, _maximize),
        optim.Adafactor: Family(
            "adafactor",
            lambda group: (no_eps1 if group["eps"][0] is None else with_eps1)(group),
            _adafactor,
            _maximize,
        ),
        optim.ASGD: Family("asgd", hypers("lr", "lambd", "alpha", "t0", "weight_decay"), _asgd, _maximize),
        optim.Rprop: Family(
            "rprop",
            hypers(
                ("eta_minus", "etas", 0),
                ("eta_plus", "etas", 1),
                ("step_size_min", "step_sizes", 0),
                ("step_size_max", "step_sizes", 1),
            ),
            _rprop,
            _maximize,
            keys={"followed": "prev"},
        ),
    }
    if hasattr(optim, "Muon"):
        table[optim.Muon] = Family(
            "muon",
            hypers("lr", "weight_decay", "momentum", "eps"),
            _muon,
            lambda group: {
                "nesterov": bool(group["nesterov"]),
                "coefficients": [float(c) for c in group["ns_coefficients"]],
                "iterations": int(group["ns_steps"]),
                "adjust": group["adjust_lr_fn"] or "original",
            },
            lazy=frozenset({"momentum_buffer"}),
        )
    return table
