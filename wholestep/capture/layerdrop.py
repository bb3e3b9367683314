"""Layer drop and its kin: Python decisions on a random scalar, such as `if torch.rand([]) < p: skip this layer`.

While a model is captured, comparisons of such a scalar with a number are decided where no draw could change them
(p <= 0 or p >= 1); all others are remembered so that the refusal can name the line and the probability.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BELOW = {torch.lt, torch.Tensor.lt, torch.Tensor.__lt__, torch.le, torch.Tensor.le, torch.Tensor.__le__}
_ABOVE = {torch.gt, torch.Tensor.gt, torch.Tensor.__gt__, torch.ge, torch.Tensor.ge, torch.Tensor.__ge__}


class RandomBranches(TorchFunctionMode):
    """Sees draws of single uniform numbers and the comparisons made with them."""

    def __init__(self) -> None:
        super().__init__()
        self.undecided: list[float] = []
        self._draws: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BELOW or func in _ABOVE:
            decided = self._decide(func in _BELOW, args)
            if decided is not None:
                return decided
        out = func(*args, **kwargs)
        if func is torch.rand and isinstance(out, torch.Tensor) and out.numel() == 1:
            self._draws.append(out)
        return out

    def _decide(self, below: bool, args: Any) -> bool | None:
        if len(args) != 2:
            return None
        draw, number = args
        if isinstance(number, torch.Tensor) and isinstance(draw, int | float):
            draw, number, below = number, draw, not below
        if not isinstance(number, int | float) or not any(draw is d for d in self._draws):
            return None
        if number <= 0:
            return not below
        if number >= 1:
            return below
        self.undecided.append(float(number))
        return None

    def explanation(self) -> tuple[str, str]:
        """What was met and what to do, for the error."""
        p = self.undecided[-1]
        return (
            f"a Python decision depends on a random number (compared with {p:g}), as layer drop does",
            "set the layer-drop probability to 0 (for transformers models: config.layerdrop = 0), or multiply the "
            "layer's result by a random 0/1 tensor instead of branching",
        )
