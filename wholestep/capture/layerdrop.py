"""Layer drop and its kin: Python decisions on a random scalar, such as `if torch.rand([]) < p: skip this layer`.

While a model is captured, comparisons of such a scalar with a number are decided where no draw could change them
(p <= 0 or p >= 1); all others are refused with the line and the probability. What else would be lost without a word
(a number read out of a tensor, a gradient hook set in forward) is refused here too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..torch_private import static_number
from .explain import current_line, in_torch_check, refuse

_BELOW = {torch.lt, torch.Tensor.lt, torch.Tensor.__lt__, torch.le, torch.Tensor.le, torch.Tensor.__le__}
_ABOVE = {torch.gt, torch.Tensor.gt, torch.Tensor.__gt__, torch.ge, torch.Tensor.ge, torch.Tensor.__ge__}
_DRAWS = {torch.rand, torch.rand_like}
_TO_BOOL = {torch.Tensor.__bool__, torch.Tensor.item}
_READS = {torch.Tensor.item, torch.Tensor.tolist}
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


#: products whose shape functions do not look at dtypes, though the kernels refuse to mix them
_ONE_DTYPE = {
    F.linear,
    F.bilinear,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
}
#: every other call is none of our business
_WATCHED = {torch.Tensor.__float__}.union(_BELOW, _ABOVE, _DRAWS, _TO_BOOL, _READS, _HOOKS, _ONE_DTYPE)


class RandomBranches(TorchFunctionMode):
    """Sees draws of single uniform numbers, the comparisons made with them, and the branches taken on those."""

    def __init__(self) -> None:
        super().__init__()
        self.undecided: list[float] = []
        self._draws: list[torch.Tensor] = []
        self._decided: list[tuple[torch.Tensor, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func in _TO_BOOL:
            for tensor, outcome in self._decided:
                if tensor is args[0]:
                    return outcome
        if func is torch.Tensor.item and any(args[0] is d for d in self._draws):
            return RandomNumber(self)
        if func is torch.Tensor.__float__ and any(args[0] is d for d in self._draws):
            raise RandomNumber(self).refused("float()")
        if func in _HOOKS:
            raise refuse(
                "a gradient hook is set in forward, and a compiled step has no autograd to call it",
                "write what the hook does with ordinary operations, or as a torch.autograd.Function",
                current_line(),
            )
        if func in _ONE_DTYPE:
            refuse_mixed_dtypes(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in _BELOW or func in _ABOVE:
            decided = self._decide(func in _BELOW, args)
            if decided is not None:
                self._decided.append((out, decided))
        elif func in _DRAWS and isinstance(out, torch.Tensor) and out.numel() == 1:
            self._draws.append(out)
        elif func in _READS and _symbolic(out) and not in_torch_check():
            raise refuse(
                f"a number is read out of a tensor (.{func.__name__}()), and its value is known only while a step runs",
                "keep it a tensor: tensors of one element multiply, compare and index like numbers",
                current_line(),
            )
        return out

    def _decide(self, below: bool, args: Any) -> bool | None:
        if len(args) != 2:
            return None
        draw, number = args
        if isinstance(number, torch.Tensor) and isinstance(draw, int | float):
            draw, number, below = number, draw, not below
        if not isinstance(number, int | float) or not any(draw is d for d in self._draws):
            return None
        return self.decide(below, number)

    def decide(self, below: bool, number: float) -> bool | None:
        """Whether a number drawn from [0, 1) is below (or above) this one, where that is certain."""
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


class RandomNumber:
    """What `torch.rand(1).item()` gives while captured: it can be compared where the outcome is certain, no more."""

    __slots__ = ("_branches",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, branches: RandomBranches):
        self._branches = branches

    def _compare(self, below: bool, other: Any) -> bool:
        decided = self._branches.decide(below, other) if isinstance(other, int | float) else None
        if decided is None:
            if self._branches.undecided:
                raise refuse(*self._branches.explanation(), current_line())
            raise self.refused()
        return decided

    def __lt__(self, other: Any) -> bool:
        return self._compare(True, other)

    def __gt__(self, other: Any) -> bool:
        return self._compare(False, other)

    __le__, __ge__ = __lt__, __gt__

    def refused(self, how: str = ".item()") -> Exception:
        return refuse(
            f"a random number is read out of a tensor ({how}), so every step would see the same one",
            "keep it a tensor: torch.rand(1) multiplies and compares like a number",
            current_line(),
        )

    def _use(self, *_: Any) -> Any:
        raise self.refused()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _use
    __float__ = __int__ = __bool__ = __eq__ = __ne__ = __neg__ = __abs__ = __round__ = __index__ = _use  # type: ignore


def refuse_mixed_dtypes(func: Any, args: Any, kwargs: Any) -> None:
    """What eager refuses when it runs: factors of different dtypes. Under autocast they are brought together."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    dtypes = dict.fromkeys(t.dtype for t in tensors if t.dtype is not torch.bool)
    if len(dtypes) > 1:
        raise refuse(
            f"tensors of different dtypes meet in {func.__name__}: {', '.join(map(str, dtypes))}",
            "bring the batch to the model's dtype (batch.to(torch.float32)), or the model to the batch's "
            "(model.to(...))",
            current_line(),
        )


def _symbolic(value: Any) -> bool:
    """Whether a number, or any in a list, is known only while a step runs."""
    if isinstance(value, list):
        return any(_symbolic(v) for v in value)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and static_number(value) is None
