"""Types of values. Every type is interned: two equal types are one object, so comparing is `is`.

Tensors have a static shape and an element type; everything prints as MLIR text.
"""

from __future__ import annotations

from typing import Any, ClassVar


class Type:
    """A type; `str(type)` is its MLIR text."""

    __slots__ = ("text",)
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def __copy__(self) -> Type:
        return self

    def __deepcopy__(self, memo: object) -> Type:
        return self


class ScalarType(Type):
    """An element type such as `f32`, `bf16`, `i64`, `ui8`, `i1` or `complex<f32>`."""

    __slots__ = ("bits", "kind")
    _interned: ClassVar[dict[str, ScalarType]] = {}
    bits: int
    kind: str  # "float", "int", "bool" or "complex"

    def __new__(cls, text: str) -> ScalarType:
        found = cls._interned.get(text)
        if found is not None:
            return found
        if text not in _SCALARS:
            raise ValueError(f"unknown element type {text!r}; known: {', '.join(_SCALARS)}")
        self = super().__new__(cls)
        self.text = text
        self.kind, self.bits = _SCALARS[text]
        cls._interned[text] = self
        return self

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScalarType, (self.text,)


_SCALARS = {
    "f64": ("float", 64),
    "f32": ("float", 32),
    "bf16": ("float", 16),
    "f16": ("float", 16),
    "f8E4M3FN": ("float", 8),
    "f8E5M2": ("float", 8),
    "i64": ("int", 64),
    "i32": ("int", 32),
    "i16": ("int", 16),
    "i8": ("int", 8),
    "ui64": ("int", 64),
    "ui32": ("int", 32),
    "ui16": ("int", 16),
    "ui8": ("int", 8),
    "i1": ("bool", 1),
    "complex<f32>": ("complex", 64),
    "complex<f64>": ("complex", 128),
}


class TensorType(Type):
    """A ranked tensor with a static shape: `tensor<2x3xf32>`, `tensor<f32>` for a 0-d one."""

    __slots__ = ("element", "shape", "size")
    _interned: ClassVar[dict[tuple[tuple[int, ...], ScalarType], TensorType]] = {}
    shape: tuple[int, ...]
    element: ScalarType
    size: int

    def __new__(cls, shape: tuple[int, ...], element: ScalarType) -> TensorType:
        key = (shape, element)
        found = cls._interned.get(key)
        if found is not None:
            return found
        self = super().__new__(cls)
        self.shape = tuple(int(d) for d in shape)
        self.element = element
        size = 1
        for d in self.shape:
            size *= d
        self.size = size
        self.text = f"tensor<{''.join(f'{d}x' for d in self.shape)}{element.text}>"
        cls._interned[(self.shape, element)] = self
        return self

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.element.bytes

    def with_shape(self, shape: tuple[int, ...]) -> TensorType:
        return TensorType(tuple(shape), self.element)

    def with_element(self, element: ScalarType) -> TensorType:
        return TensorType(self.shape, element)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorType, (self.shape, self.element)


class FunctionType(Type):
    """The type of a function: `(tensor<f32>) -> tensor<f32>`."""

    __slots__ = ("inputs", "results")
    _interned: ClassVar[dict[tuple[tuple[Type, ...], tuple[Type, ...]], FunctionType]] = {}
    inputs: tuple[Type, ...]
    results: tuple[Type, ...]

    def __new__(cls, inputs: tuple[Type, ...], results: tuple[Type, ...]) -> FunctionType:
        key = (tuple(inputs), tuple(results))
        found = cls._interned.get(key)
        if found is not None:
            return found
        self = super().__new__(cls)
        self.inputs, self.results = key
        out = ", ".join(t.text for t in self.results)
        if len(self.results) != 1 or isinstance(self.results[0], FunctionType):
            out = f"({out})"
        self.text = f"({', '.join(t.text for t in self.inputs)}) -> {out}"
        cls._interned[key] = self
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionType, (self.inputs, self.results)


class DialectType(Type):
    """A type that a dialect declares: `!move.buffer<tensor<4xf32>, "hbm">`; parameters are attributes."""

    __slots__ = ("name", "parameters")
    _interned: ClassVar[dict[str, DialectType]] = {}
    name: str
    parameters: tuple[Any, ...]

    def __new__(cls, name: str, parameters: tuple[Any, ...] = ()) -> DialectType:
        from .attributes import attribute_text

        text = f"!{name}"
        if parameters:
            text += f"<{', '.join(attribute_text(p) for p in parameters)}>"
        found = cls._interned.get(text)
        if found is not None:
            return found
        self = super().__new__(cls)
        self.text, self.name, self.parameters = text, name, tuple(parameters)
        cls._interned[text] = self
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return DialectType, (self.name, self.parameters)


F64, F32, BF16, F16 = ScalarType("f64"), ScalarType("f32"), ScalarType("bf16"), ScalarType("f16")
I64, I32, BOOL = ScalarType("i64"), ScalarType("i32"), ScalarType("i1")
