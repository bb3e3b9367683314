"""Derivatives of ops without a rule of ours: traced from PyTorch's autograd once per signature, then replayed.

The trace calls the op's own reference implementation on fake tensors, asks autograd for the gradients, and imports the
ATen calls that autograd made. The forward call in the trace is the op itself again; CSE merges the two.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture.importer import import_graph
from ..dialects.step import StepBuilder, torch_dtype
from ..errors import CaptureError, DifferentiationError
from ..ir.attributes import freeze
from ..ir.core import Op, Value
from ..torch_private import FakeTensorMode, is_data_dependent, make_fx

#: recurrent layers of the library pick their kernels by the real tensors, so a trace on fake ones would not be theirs
WHOLE_BACKWARD = ("lstm.", "gru.", "rnn_tanh.", "rnn_relu.")


class VjpCache:
    """Traced derivatives by signature: op, attributes, operand types, which gradients exist and which are wanted."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._graphs: dict[Any, torch.fx.GraphModule | None] = {}
        self._device = torch.device(device)
        self.traced: dict[str, int] = {}

    def pull_back(self, b: StepBuilder, op: Op, outgoing: list[Value | None], wanted: list[bool]) -> list[Value | None]:
        """Gradients of the operands, as step ops."""
        attributes = {k: v for k, v in op.attributes.items() if k != "phase"}
        given = tuple(g is not None for g in outgoing)
        key = (op.name, freeze(attributes), tuple(v.type for v in op.operands), given, tuple(wanted))
        if key not in self._graphs:
            self._graphs[key] = trace(op, outgoing, wanted, self._device)
        graph = self._graphs[key]
        name = op.attributes.get("target", op.name)
        self.traced[name] = self.traced.get(name, 0) + 1
        if graph is None:
            return at_run_time(b, op, outgoing, wanted)
        try:
            results = iter(import_graph(b, graph, [*op.operands, *(g for g in outgoing if g is not None)]))
        except CaptureError:  # autograd's way is none for a program: as_strided's writes through views of its own
            if op.name != "step.opaque":
                raise
            self._graphs[key] = None
            return at_run_time(b, op, outgoing, wanted)
        return [next(results) if w else None for w in wanted]


def at_run_time(b: StepBuilder, op: Op, outgoing: list[Value | None], wanted: list[bool]) -> list[Value | None]:
    """The gradients as one op that asks autograd while the step runs."""
    chosen = tuple(i for i, w in enumerate(wanted) if w)
    given = tuple(i for i, g in enumerate(outgoing) if g is not None)
    out = b.opaque_grad(
        [*op.operands, *(g for g in outgoing if g is not None)],
        target=op.target,
        arguments=op.arguments,
        keywords=op.keywords,
        wanted=chosen,
        given=given,
        result_types=[op.operands[i].type for i in chosen],
    )
    grads = iter([out] if isinstance(out, Value) else out)
    return [next(grads) if w else None for w in wanted]


def trace(
    op: Op, outgoing: list[Value | None], wanted: list[bool], device: torch.device
) -> torch.fx.GraphModule | None:
    """The backward of one op as an fx graph: operands, then gradients in; gradients of the wanted operands out.

    None for an opaque operator whose backward decides by the data: its gradient is left to run time.
    """
    if op.attributes.get("target", "").partition(".")[2].startswith(WHOLE_BACKWARD):
        return None
    run = op.definition.evaluate(op)  # type: ignore[attr-defined]
    count = len(op.operands)

    def backward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        operands = [t.detach().requires_grad_(w) for t, w in zip(tensors[:count], wanted, strict=True)]
        with torch.enable_grad():
            out = run(*operands)
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        cotangents = iter(tensors[count:])
        pairs = [(o, next(cotangents)) for o, g in zip(outs, outgoing, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        inputs = [t for t, w in zip(operands, wanted, strict=True) if w]
        if not pairs:
            return [torch.zeros_like(t) for t in inputs]
        got = torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, got, strict=True)]

    mode = FakeTensorMode()
    with mode:
        fakes = [
            torch.empty(v.type.shape, dtype=torch_dtype(v.type.element), device=device)
            for v in (*op.operands, *(g for g in outgoing if g is not None))
        ]
    try:
        return make_fx(backward, tracing_mode="fake")(*fakes)
    except Exception as error:
        if op.name == "step.opaque" and is_data_dependent(error):
            return None
        name = op.attributes.get("target", op.name)
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DifferentiationError(
            f"{name} of layer {op.loc} has no gradient that can be traced: {text}\n"
            "Try: detach its input if no gradient is meant to flow here, or write it with differentiable operations"
        ) from error
