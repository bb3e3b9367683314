"""What cuDNN is to compute, as data: tensors with their strides, and the operations between them in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...dialects.strides import Strides, row_major
from ..kernels import Spec

#: who has a tensor's memory: the caller; the caller too, but nobody looks at it afterwards; nobody; it is one number
GIVEN, INNER, VIRTUAL, NUMBER = "given", "inner", "virtual", "number"
MATMUL, POINTWISE, REDUCTION, RESHAPE = "matmul", "pointwise", "reduction", "reshape"
#: x, w -> y; dy, w -> dx; x, dy -> dw
CONVOLUTION, INPUT_GRADIENT, WEIGHT_GRADIENT = "convolution", "input gradient", "weight gradient"


@dataclass(frozen=True, slots=True)
class Window:
    """How a kernel walks over an image: a number per spatial dimension. There are as many zeros before as behind."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a graph, by its number."""

    id: int
    kind: str
    spec: Spec
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. mode: of pointwise ones and reductions. axis: the one whose indices are made. window: of
    convolutions and their gradients."""

    kind: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    mode: str = ""
    axis: int | None = None
    window: Window | None = None


@dataclass(slots=True)
class Graph:
    """Operations in order, and the tensors that have memory, in the order in which a launcher gets them."""

    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Tensor]:
        return [t for t in self.tensors if t.kind in kinds]

    @property
    def scratch(self) -> tuple[Spec, ...]:
        """Memory that a caller brings along."""
        return tuple([t.spec for t in self.of(INNER)])

    def tensor(self, kind: str, spec: Spec, value: float = 0.0) -> Tensor:
        made = Tensor(len(self.tensors) + 1, kind, spec, value)
        self.tensors.append(made)
        return made

    def number(self, value: float) -> Tensor:
        return self.tensor(NUMBER, Spec((1, 1, 1, 1), (1, 1, 1, 1), torch.float32), value)

    def virtual(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, strides: Strides | None = None
    ) -> Tensor:
        return self.tensor(VIRTUAL, Spec(shape, strides or row_major(shape), dtype))

    def matmul(self, left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
        """left [.., m, k] by right [.., k, n], in f32 unless it goes somewhere."""
        shape = (*left.spec.shape[:-1], right.spec.shape[-1])
        return self.add(Node(MATMUL, (left, right), into or self.virtual(shape)))

    def pointwise(self, mode: str, *inputs: Tensor, into: Tensor | None = None, axis: int | None = None) -> Tensor:
        """One number for every element of the first input, in f32 unless it goes somewhere."""
        return self.add(Node(POINTWISE, inputs, into or self.virtual(inputs[0].spec.shape), mode, axis))

    def reduction(self, mode: str, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Along the last dimension, or along those in which what it goes to is shorter."""
        return self.add(Node(REDUCTION, (x,), into or self.virtual((*x.spec.shape[:-1], 1)), mode))

    def turned(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x with its last two dimensions exchanged."""
        spec = transposed(x.spec)
        return self.add(Node(RESHAPE, (x,), self.virtual(spec.shape, dtype, spec.strides)))

    def convolution(self, kind: str, left: Tensor, right: Tensor, into: Tensor, window: Window) -> Tensor:
        """A convolution or one of its gradients."""
        return self.add(Node(kind, (left, right), into, window=window))

    def add(self, node: Node) -> Tensor:
        self.nodes.append(node)
        return node.output


def transposed(spec: Spec) -> Spec:
    """The same memory with the last two dimensions exchanged."""
    (*lead, m, n), (*steps, a, b) = spec.shape, spec.strides
    return Spec((*lead, n, m), (*steps, b, a), spec.dtype)
