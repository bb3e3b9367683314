"""Python values that a capture reads: attributes of modules, and names that the loss function takes from outside.

They are part of the program, so a step that finds them changed is compiled again. Tensors among them are read at every
step and may be filled; only another tensor in their place is a change.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CaptureError
from ..torch_private import without_modes

PLAIN = (bool, int, float, str, type(None))
TENSORS = (torch.Tensor, nn.Parameter)
#: what stands where nothing is
GONE = object()
#: bytes of the largest tensor that is put back where tracing has changed it
MOST_KEPT = 1 << 26


class Read(NamedTuple):
    """A value as it was read: a member of a table, or what a cell of a closure holds."""

    table: Mapping[str, Any] | CellType
    key: str
    value: Any
    #: who has it, in words
    owner: str

    def now(self) -> Any:
        if not isinstance(self.table, CellType):
            return self.table.get(self.key, GONE)
        try:
            return self.table.cell_contents
        except ValueError:  # it is empty
            return GONE

    def same(self) -> bool:
        now = self.now()
        return now is self.value or (type(now) is type(self.value) and is_plain(now) and equal(now, self.value))

    def __str__(self) -> str:
        now = self.now()
        if is_plain(self.value) and is_plain(now):
            return f"{self.key} of {self.owner} was {self.value!r} and is {now!r}"
        return f"{self.key} of {self.owner} is another {type(self.value).__name__}"


class Reads:
    """What a program was made from, beside its inputs."""

    def __init__(self) -> None:
        #: values in modules, by module and name; what a loss function reads from outside
        self.settings: dict[tuple[int, str], Read] = {}
        self.names: list[Read] = []
        #: numbers on the host that were taken as they were, since the program runs on another device
        self.numbers: list[tuple[torch.Tensor, float]] = []
        #: tensors that are read at every step and are neither parameters nor buffers of the model
        self.tensors: list[torch.Tensor] = []
        #: modules that were looked at, the model's and others that a loss function calls
        self.modules: dict[int, nn.Module] = {}
        self._kept: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    def note(self, module: nn.Module, name: str, value: Any, own: Container[int] = ()) -> None:
        """A module was asked for an attribute. own: the modules of the model, whose buffers tracing leaves alone."""
        if id(module) not in self.modules:
            self.modules[id(module)] = module
            attributes = object.__getattribute__(module, "__dict__")
            self.keep(attributes.values())
            if id(module) not in own:
                self.keep(attributes.get("_buffers", {}).values())
        if (id(module), name) not in self.settings and is_plain(value) and not name.startswith("__"):
            attributes = object.__getattribute__(module, "__dict__")
            if name in attributes:
                self.settings[id(module), name] = Read(attributes, name, value, type(module).__name__)

    def keep(self, values: Iterable[Any]) -> None:
        """Tracing computes for real with tensors that are no parameters and no buffers: they are put back after it."""
        with without_modes():
            for t in values:
                if type(t) is torch.Tensor and not t.is_meta and t.layout is torch.strided:
                    small = t.numel() * t.element_size() <= MOST_KEPT
                    self._kept.append((t, t._version, t.detach().clone() if small else None))

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, version, value in self._kept:
                if tensor._version != version and value is None:
                    raise CaptureError(
                        f"forward changes a tensor of shape {list(tensor.shape)} in place that is neither a parameter "
                        "nor a buffer; make it a buffer: self.register_buffer(name, tensor)"
                    )
                if tensor._version != version and value is not None:
                    tensor.copy_(value)
        self._kept.clear()

    def finish(self, wrapper: nn.Module, constants: Mapping[str, Any], paths: Mapping[int, str]) -> None:
        """After a capture: tensors that the program took from attributes, and names of the layers."""
        self.modules.pop(id(wrapper), None)
        self.settings = {key: read for key, read in self.settings.items() if key[0] != id(wrapper) and read.same()}
        used = {t.untyped_storage()._cdata for t in constants.values() if type(t) in TENSORS}
        for module in self.modules.values():
            tables = [vars(module)] if id(module) in paths else [vars(module), module._parameters, module._buffers]
            for table in tables:
                for name, value in table.items():
                    if type(value) in TENSORS and value.untyped_storage()._cdata in used:
                        self.settings[id(module), name] = Read(table, name, value, type(module).__name__)
        self.settings = {
            key: read._replace(owner=paths[key[0]] or read.owner) if key[0] in paths else read
            for key, read in self.settings.items()
        }

    def leave_out(self, changed: Iterable[tuple[int, str]]) -> None:
        """What forward itself changes is no setting of the user's."""
        for key in changed:
            self.settings.pop(key, None)

    def same_settings(self) -> bool:
        return all(read.same() for read in self.settings.values())

    def same_names(self) -> bool:
        for read in self.names:
            if not read.same():
                return False
        return all(equal(tensor.item(), value) for tensor, value in self.numbers)

    def changes(self) -> list[str]:
        """What is not as it was, in words."""
        found = [str(read) for read in (*self.settings.values(), *self.names) if not read.same()]
        moved = [(t.item(), value) for t, value in self.numbers if not equal(t.item(), value)]
        return found + [f"a tensor on the host was {value!r} and is {now!r}" for now, value in moved]


def is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def is_watched(value: Any) -> bool:
    return is_plain(value) or type(value) in TENSORS or isinstance(value, nn.Module)


def equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


#: who notes reads, by thread, and which modules are its model's
NOTING: dict[int, tuple[Reads, Container[int]]] = {}
NOTED = threading.Lock()


def reading(module: nn.Module, name: str) -> Any:
    """Stands in for `nn.Module.__getattribute__` while anything is captured."""
    value = super(nn.Module, module).__getattribute__(name)
    if (noting := NOTING.get(threading.get_ident())) is not None:
        noting[0].note(module, name, value, noting[1])
    return value


@contextmanager
def reads_of_modules(own: Container[int]) -> Iterator[Reads]:
    """Notes which attributes this thread reads of any module. own: the modules of the model."""
    found, thread = Reads(), threading.get_ident()
    with NOTED:
        before = NOTING.get(thread)
        NOTING[thread] = found, own
        nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        with NOTED:
            NOTING.pop(thread) if before is None else NOTING.update({thread: before})
            if not NOTING:
                del nn.Module.__getattribute__
        found.put_back()


def all_settings(*roots: Any) -> Reads:
    """Every plain setting of some modules: where nobody knows which of them are read."""
    found = Reads()
    for root in roots:
        if isinstance(root, nn.Module):
            for path, module in root.named_modules():
                found.modules[id(module)] = module
                for name, value in vars(module).items():
                    if is_plain(value):
                        owner = path or type(module).__name__
                        found.settings[id(module), name] = Read(vars(module), name, value, owner)
    return found


def names_read(function: Any) -> list[Read]:
    """Numbers, tensors and modules that a function reads from outside: globals, closures, members of objects in those.

    Functions of the same file that it names are followed. What it takes out of lists and dictionaries is not seen.
    """
    found: dict[tuple[int, str], Read] = {}
    seen: set[tuple[int, int]] = set()

    def look(table: Any, key: str, value: Any, names: set[str], owner: str, home: Any) -> None:
        if is_watched(value):
            found.setdefault((id(table), key), Read(table, key, value, owner))
        elif isinstance(value, FunctionType | MethodType | partial):
            if getattr(inner(value), "__globals__", None) is home:
                visit(value)
        elif not isinstance(value, type | ModuleType) and type(getattr(value, "__dict__", None)) is dict:
            for name in names & vars(value).keys():
                if is_watched(vars(value)[name]):
                    found.setdefault((id(vars(value)), name), Read(vars(value), name, vars(value)[name], key))
            for name in names & vars(type(value)).keys():
                if getattr(method := vars(type(value))[name], "__globals__", None) is home:
                    visit(MethodType(method, value))

    def visit(given: Any) -> None:
        function = inner(given)
        if not isinstance(function, FunctionType) or (id(function), id(getattr(given, "__self__", None))) in seen:
            return
        seen.add((id(function), id(getattr(given, "__self__", None))))
        names = names_in(function.__code__)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        owner, home = function.__name__, function.__globals__
        if isinstance(given, MethodType) and not isinstance(given.__self__, nn.Module):
            look({}, type(given.__self__).__name__, given.__self__, names, owner, home)
        for name, cell in cells.items():
            try:
                look(cell, name, cell.cell_contents, names, owner, home)
            except ValueError:
                continue
        for name in names & home.keys():
            look(home, name, home[name], names, owner, home)

    visit(function)
    return list(found.values())


def outside_tensors(names: Iterable[Read]) -> dict[str, torch.Tensor]:
    """Tensors that a loss function reads from outside, by name: alone, or in a module that it calls."""
    found: dict[str, torch.Tensor] = {}
    for read in names:
        if type(read.value) in TENSORS:
            found.setdefault(read.key, read.value)
        elif isinstance(read.value, nn.Module):
            for path, tensor in (*read.value.named_parameters(), *read.value.named_buffers()):
                found.setdefault(f"{read.key}.{path}", tensor)
    return found


def inner(given: Any) -> Any:
    """The function below a method, a partial application or a wrapper."""
    while not isinstance(given, FunctionType):
        below: Callable[..., Any] | None = getattr(given, "__func__", None) or getattr(given, "func", None)
        if below is None:
            return given
        given = below
    return given


def names_in(code: CodeType) -> set[str]:
    """Names that some code reads, in the functions inside of it as well."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
    return found
