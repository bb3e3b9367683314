"""`torch.autograd.Function` while a model is captured: its forward is traced, its own backward is kept as its gradient.

torch.export would keep the forward alone. Here the results go through `wholestep::custom_function`, an operator that
copies them and whose gradient is the user's `backward`; autodiff traces that like any other operator's. Reentrant
checkpoints are such functions too, and are ordinary code to a compiler that decides itself what to save.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import checkpoint

from ..errors import InputError
from .explain import current_line, refuse
from .structure import flatten, unflatten

#: the functions of programs being built, by the number that is part of the operator's text; a capture keeps them alive
_APPLIED: weakref.WeakValueDictionary[str, AppliedFunction] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class AppliedFunction:
    """One call of a custom function: its class, what its context held, and where its gradients go."""

    def __init__(self, function: type, inputs: tuple[Any, ...]):
        self.function = function
        self.tensor_inputs = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        self.needs = tuple(isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs)
        self.saved: Any = ()
        self.attributes: dict[str, Any] = {}
        self.fixed: dict[str, Any] = {}

    def remember(self, context: Context) -> list[torch.Tensor]:
        """Takes the tensors out of the context that backward will see."""
        tensors: list[torch.Tensor] = []
        self.saved = flatten(tuple(context.saved_tensors), tensors, [])
        for name, value in vars(context).items():
            if name in ("saved_tensors", "needs_input_grad"):
                continue
            try:
                self.attributes[name] = flatten(value, tensors, [])
            except InputError:
                self.fixed[name] = value  # an object without tensors that we can see: as it is
        return tensors

    def backward(self, saved: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The user's backward: gradients of the tensor inputs."""
        context = SimpleNamespace(
            saved_tensors=unflatten(self.saved, saved),
            saved_variables=unflatten(self.saved, saved),
            needs_input_grad=self.needs,
            **{name: unflatten(s, saved) for name, s in self.attributes.items()},
            **self.fixed,
        )
        function: Any = self.function
        pull_back = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
        out = pull_back(context, *gradients)
        flat = out if isinstance(out, tuple | list) else (out,)
        return [flat[i] if i < len(flat) else None for i in self.tensor_inputs]


class Context:
    """What `forward` and `setup_context` get for `ctx`."""

    def __init__(self, needs: tuple[bool, ...]):
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad = needs

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass  # gradients of such outputs arrive as zeros

    def set_materialize_grads(self, value: bool) -> None:
        pass  # gradients are always tensors here

    def mark_dirty(self, *tensors: Any) -> None:
        raise refuse(
            "a torch.autograd.Function changes its input in place (ctx.mark_dirty)",
            "return a new tensor from its forward",
            current_line(),
        )


@torch.library.custom_op("wholestep::custom_function", mutates_args=())
def custom_function(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor], saved: list[torch.Tensor], number: str
) -> list[torch.Tensor]:
    """The outputs; their gradient with respect to the inputs is the custom function's own."""
    return [t.clone() for t in outputs]


@custom_function.register_fake
def _(inputs, outputs, saved, number):
    return [torch.empty_like(t) for t in outputs]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.counts = [len(part) for part in inputs[:3]]
    ctx.number = inputs[3]
    ctx.save_for_backward(*inputs[2], *output)


def _backward(ctx: Any, gradients: Any) -> Any:
    _, outputs, saved = ctx.counts
    applied = _APPLIED.get(ctx.number)
    if applied is None:
        raise RuntimeError("the gradient of this custom function belongs to a program that is gone")
    tensors = ctx.saved_tensors
    whole = [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, tensors[saved:], strict=True)]
    return applied.backward(list(tensors[:saved]), whole), [None] * outputs, [None] * saved, None


custom_function.register_autograd(_backward, setup_context=_setup)


def apply(function: Any, original: Any, kept: list[AppliedFunction], *args: Any, **kwargs: Any) -> Any:
    """What `Function.apply` does while a model is captured."""
    if function is checkpoint.CheckpointFunction:
        run, _, *inputs = args
        out = run(*inputs)
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return out
        # as in eager: a reentrant checkpoint none of whose inputs needs a gradient gives none to its parameters either
        tensors: list[torch.Tensor] = []
        structure = flatten(out, tensors, [])
        return unflatten(structure, [t.detach() for t in tensors])
    if function.__module__.startswith("torch."):
        return original(*args, **kwargs)
    if kwargs:
        raise refuse(f"{function.__qualname__}.apply is called with keywords", "pass them by position", current_line())
    applied = AppliedFunction(function, args)
    context = Context(applied.needs)
    if function.setup_context is torch.autograd.Function.setup_context:
        result = function.forward(context, *args)
    else:
        result = function.forward(*args)
        function.setup_context(context, args, result)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    tensors = [t.detach() for t in outputs if isinstance(t, torch.Tensor)]
    if not tensors or not any(applied.needs):
        return result
    saved = [t.detach() for t in applied.remember(context)]
    number = f"{function.__qualname__}#{next(_NUMBERS)}"
    _APPLIED[number] = applied
    kept.append(applied)
    given = [args[i] for i in applied.tensor_inputs]
    wrapped = iter(custom_function(given, tensors, saved, number))
    outputs = [next(wrapped) if isinstance(t, torch.Tensor) else t for t in outputs]
    return tuple(outputs) if isinstance(result, tuple | list) else outputs[0]


@contextlib.contextmanager
def traced_functions() -> Iterator[list[AppliedFunction]]:
    """While this is active, this thread's `Function.apply` is traced; gives the list that keeps the functions alive."""
    kept: list[AppliedFunction] = []
    thread = threading.get_ident()
    base = torch.autograd.Function
    before = base.__dict__.get("apply")
    original = base.apply.__func__  # type: ignore[attr-defined]

    def patched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(cls, *args, **kwargs)
        return apply(cls, functools.partial(original, cls), kept, *args, **kwargs)

    base.apply = classmethod(patched)  # type: ignore[assignment]
    try:
        yield kept
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before
