"""Operator dialects: who can run a region. A provider says what it claims, what it expects that to cost, and builds it.

`aten` runs anything, op by op; the libraries below it take part with it: `cublas` has other algorithms for matrix
products, `cudnn` writes attention and convolutions in place. `triton` and `cpp` generate kernels from the loop form;
`inductor` hands the body to PyTorch's own compiler. A provider of a user's is a subclass of `Provider` that was given
to `register_provider`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import torch

from ..dialects.step import constant_value, torch_dtype
from ..errors import InputError
from ..ir.core import Op
from ..ir.hashing import structural_hash
from ..transforms.attention_sides import ATTENTION
from ..transforms.regions import ANCHORS
from . import batched
from .aten import lower, run_calls
from .convolutions import one_convolution
from .cublas import library as cublas_library
from .cublas import ways as cublas_ways
from .cudnn import library as cudnn_library
from .cudnn import ways as cudnn_ways
from .kernels import Spec
from .made_up import looks_up_what_it_computes, neutral_inputs
from .matrices import one_product
from .wgmma import library as wgmma_library
from .wgmma import ways as wgmma_ways

#: what a built kernel is: it is called with the tensors of a region, its results and its scratch memory
Launcher = Callable[..., Any]
#: (done, total)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Region:
    """What one kernel is to do: the ops as a function, their loop form where there is one, and how tensors lie."""

    body: Op
    kernel: Op | None
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    device: torch.device
    #: of a batch: the regions it consists of (`batched.py`)
    parts: tuple[Region, ...] = ()

    @property
    def ops(self) -> list[Op]:
        """The ops of the body, in order."""
        return [op for op in self.body.regions[0].block if not op.definition.terminator]

    @property
    def only(self) -> Op | None:
        """The op that it is, on its operands as they are and with all its results, where it is nothing else."""
        ops, block = self.ops, self.body.regions[0].block
        if len(ops) != 1 or self.parts or block.last is None:
            return None
        same = list(ops[0].operands) == list(block.arguments) and list(ops[0].results) == list(block.last.operands)
        return ops[0] if same else None

    @property
    def specs(self) -> tuple[Spec, ...]:
        return (*self.operands, *self.results)

    @cached_property
    def key(self) -> str:
        """Equal for regions that do the same on tensors that lie alike."""
        text = [structural_hash(self.body.regions[0].block, ("phase",))]
        text += [f"{s.shape}{s.strides}{s.dtype}" for s in self.specs]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:40]

    @property
    def bytes(self) -> int:
        """What is read and written if every tensor is touched once."""
        return sum(distinct_bytes(s) for s in self.specs)


def distinct_bytes(spec: Spec) -> int:
    """Bytes of a tensor's distinct elements."""
    count = 1
    for n, stride in zip(spec.shape, spec.strides, strict=True):
        count *= n if stride else 1
    return count * spec.dtype.itemsize


@dataclass(frozen=True)
class Offer:
    """One way to run a region: a name that stays the same over runs, and the memory it needs beside its tensors."""

    name: str
    key: str
    scratch: tuple[Spec, ...] = ()
    made: Any = field(default=None, compare=False)
    #: whether it may beat the best guess: others are for those who try everything, and where nothing else works
    likely: bool = field(default=True, compare=False)


class Unwritten(Offer):
    """A way of which a generator knows the name before it is written: the key and the memory come with the text."""

    def __init__(self, made: Any, name: str = ""):
        vars(self).update(made=made, name=name or made.name, likely=made.likely)

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.made.key

    @property
    def scratch(self) -> tuple[Spec, ...]:  # type: ignore[override]
        return tuple(self.made.scratch)


class Provider(ABC):
    """A kernel library, seen from outside."""

    name: ClassVar[str]
    #: kinds of devices it runs on
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: the module that writes several regions as one launch, of a provider that can
    batching: ClassVar[str] = ""
    #: ops that it may run in ATen's place where they stand alone
    alone: ClassVar[tuple[str, ...]] = ()
    #: whether its ways take so long to build that it competes only where it is named, and where most can be gained
    slow: ClassVar[bool] = False
    #: whether it runs attention with the loops around it as one kernel
    attends: ClassVar[bool] = False
    #: the provider that this one takes part with wherever that competes with others, such as one that calls it too
    below: ClassVar[str] = ""
    #: the provider whose processes compile for it as well, ahead of `build`: what it offers has `jobs` for them
    compiled_by: ClassVar[str] = ""

    def absent(self) -> str:
        """Empty where it can work on this machine, else what is lost without it, in one line."""
        return ""

    def takes(self, op: Op) -> bool:
        """Whether an op is to be a region of its own for this provider, instead of being fused with its neighbours."""
        return False

    def at_once(self, region: Region) -> bool:
        """Whether its ways take no time to build, so that all of them are tried at once."""
        return False

    def follows(self, region: Region | None = None) -> bool:
        """Whether it runs wide products with what follows them inside: any on this machine, or this one."""
        return False

    @abstractmethod
    def claims(self, region: Region) -> str:
        """Empty where it can run the region, else why it cannot."""

    def estimate(self, region: Region, bandwidth: float) -> float:
        """Seconds that it expects to need: what must move, at this many bytes per second."""
        return region.bytes / bandwidth

    @cached_property
    def version(self) -> str:
        """What its code is now: what was measured with other code is measured again. By default that of its file and of
        those that this one imports from its package or, where it is in none, from its folder."""
        try:
            return version_of(own_files(sys.modules[type(self).__module__]))
        except (OSError, TypeError, KeyError):  # it was not defined in a file
            return ""

    @abstractmethod
    def offers(self, region: Region) -> list[Offer]:
        """The ways it has to run a region, the best guess first."""

    def offer(self, region: Region, name: str) -> Offer | None:
        """The way of that name, which was offered before."""
        return next((o for o in self.offers(region) if o.name == name), None)

    @abstractmethod
    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        """What runs each offer, by its key. A way that cannot be built is an exception, which is not raised."""


def version_of(files: Iterable[Path]) -> str:
    """A hash of source files."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def own_files(module: ModuleType) -> list[Path]:
    """The files of a module and of those that it names something of, and they of others, as far as they are in its
    package or, where it is in none, in its folder."""
    home, package = Path(inspect.getfile(module)).parent, package_of(module)
    found: dict[str, Path] = {}
    pending: list[Any] = [module]
    while pending:
        one = pending.pop()
        file = Path(getattr(one, "__file__", None) or "")
        if one.__name__ in found or package_of(one) != package or not (package or file.parent == home):
            continue
        found[one.__name__] = file
        for value in vars(one).values():
            named = value if inspect.ismodule(value) else sys.modules.get(str(getattr(value, "__module__", "")))
            pending += [] if named is None else [named]
    return sorted({file for file in found.values() if file.suffix == ".py"})


def package_of(module: Any) -> str:
    """The outermost package that a module is in; empty for a script."""
    return (getattr(module, "__package__", None) or "").partition(".")[0]


_PROVIDERS: dict[str, Provider] = {}


def register_provider(cls: type[Provider]) -> type[Provider]:
    """Class decorator: makes a provider known, from our files or from a user's."""
    if not cls.name.isidentifier():
        raise ValueError(f"{cls.name!r} is no name for a provider")
    _PROVIDERS[cls.name] = cls()
    return cls


def forget_provider(name: str) -> None:
    """Takes a registered provider out again."""
    _PROVIDERS.pop(name, None)


def known_providers() -> list[str]:
    return list(_PROVIDERS)


def providers_for(device: torch.device, names: Sequence[str] | None) -> list[Provider]:
    """The providers that compete on a device; None for all but those that have to be asked for by name. One that stands
    alone has no competitors, not even the libraries below it."""
    for name in names or ():
        if name not in _PROVIDERS:
            raise InputError(f"there is no provider {name!r}; known: {', '.join(_PROVIDERS)}")
    chosen = [n for n, p in _PROVIDERS.items() if not p.slow] if names is None else list(names)
    if len(chosen) > 1:
        chosen = [each for n in chosen for each in (n, *(low for low, p in _PROVIDERS.items() if p.below == n))]
    return [_PROVIDERS[n] for n in dict.fromkeys(chosen) if device.type in _PROVIDERS[n].devices]


def why_nothing_is_fused(device: torch.device, names: Sequence[str] | None) -> str:
    """Where somebody else than ATen was named, and nobody who was has kernels for the device: so much in one line."""
    if not set(names or ()) - {"aten"} or any(p.name != "aten" for p in providers_for(device, names)):
        return ""
    other = "cpp" if device.type == "cpu" else "triton"
    return (
        f"of the providers that were named ({', '.join(names or ())}) none has kernels for {device.type}: PyTorch runs "
        f"every op, nothing is fused. Try: providers=None, or name {other}"
    )


def has_attention(region: Region) -> bool:
    return any(op.name in ATTENTION for op in region.ops)


@register_provider
class Aten(Provider):
    """PyTorch's own kernels, one op after the other."""

    name = "aten"
    version = ""  # (times are kept per version of torch)

    def claims(self, region: Region) -> str:
        return ""

    def offers(self, region: Region) -> list[Offer]:
        return [Offer("aten", f"aten {region.key}", made=region)]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        return {o.key: self.launcher(o.made) for o in offers}

    def launcher(self, region: Region) -> Launcher:
        in_place = one_convolution(region) or one_product(region)
        return in_place or copying(op_by_op(region), len(region.operands))


def op_by_op(region: Region) -> Callable[..., list[torch.Tensor]]:
    """A function that runs the ops of a region through ATen."""
    block = region.body.regions[0].block
    calls = [lower(op, region.device) for op in region.ops]
    assert block.last is not None
    results = block.last.operands

    def run(*operands: torch.Tensor) -> list[torch.Tensor]:
        values: dict[Any, Any] = dict(zip(block.arguments, operands, strict=True))
        run_calls(calls, values)
        return [values[v] for v in results]

    return run


def copying(function: Callable[..., list[torch.Tensor]], operands: int) -> Launcher:
    """A function that makes its results as one that writes where it is told."""

    def run(*tensors: torch.Tensor) -> None:
        made = function(*tensors[:operands])
        for out, value in zip(tensors[operands:], made, strict=False):
            out.copy_(value)

    return run


class Generator(Provider):
    """A provider that generates code from the loop form of a region, by a package with the interface of `cpp`."""

    package: ClassVar[str]
    #: modules with kernels that were written by hand for one kind of op
    templates: ClassVar[tuple[str, ...]] = ()
    #: the same for ops that stand alone (`alone`): no op is a region for their sake, they are asked where one is
    lone_templates: ClassVar[tuple[str, ...]] = ()
    #: modules beside its package that templates need
    helpers: ClassVar[tuple[str, ...]] = ()
    #: transforms that write what it generates code from
    written_by: ClassVar[tuple[str, ...]] = ("loops",)

    @property
    def code(self) -> Any:
        return importlib.import_module(f"wholestep.backends.{self.package}")

    @cached_property
    def version(self) -> str:  # type: ignore[override]
        """Of its package, of its templates with what they need and of what writes loops."""
        here = Path(__file__).parent
        files = [
            here / f"{name.replace('.', '/')}.py" for name in (*self.templates, *self.lone_templates, *self.helpers)
        ]
        for folder in (here / self.package.partition(".")[0], here.parent / "dialects" / "loop"):
            files += sorted([*folder.glob("*.py"), *folder.glob("*.h")])
        return version_of([*files, *(here.parent / "transforms" / f"{name}.py" for name in self.written_by)])

    @property
    def batches(self) -> Any:
        return importlib.import_module(f"wholestep.backends.{self.batching}")

    @cached_property
    def written(self) -> list[Any]:
        return [importlib.import_module(f"wholestep.backends.{name}") for name in self.templates]

    @cached_property
    def lone(self) -> list[Any]:
        return [importlib.import_module(f"wholestep.backends.{name}") for name in self.lone_templates]

    def template(self, region: Region) -> Any:
        """The template that runs a region, or an op of it; or None."""
        whole = next((t for t in self.lone if t.runs(region)), None)
        return whole or next((t for t in self.written for op in region.ops if t.takes(op)), None)

    def takes(self, op: Op) -> bool:
        return any(t.takes(op) for t in self.written)

    def claims(self, region: Region) -> str:
        template = self.template(region)
        if template is not None:
            return template.why_not(region)
        if region.parts:
            return batched.why_not(self.code, self.batches, region) if self.batching else "it is a batch"
        if region.kernel is None:
            return "it has no loop form"
        if any(op.name in ANCHORS for op in region.ops):
            return self.why_no_product(region)
        return self.code.why_not(region.kernel, region.specs)

    def why_no_product(self, region: Region) -> str:
        """Why a region around a product or a convolution cannot be generated."""
        return "a product is left to the libraries"

    def offers(self, region: Region) -> list[Offer]:
        template = self.template(region)
        if template is not None:
            return template.offers(region)
        if region.parts:
            way = batched.way_of(self.code, self.batches, region)
            return [Offer(way.name, way.key, way.scratch, way)]
        found = self.code.candidates(region.kernel, region.specs)
        return [Offer(c.name, c.key, tuple(c.scratch), c) for c in found]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        mine = [(t, [o for o in offers if isinstance(o.made, t.Way)]) for t in (*self.written, *self.lone)]
        rest = [o for o in offers if not any(o in own for _, own in mine)]
        found = self.generated(rest, report) if rest else {}
        for template, own in mine:
            found |= template.build(own, report) if own else {}
        return found

    def generated(self, offers: Sequence[Offer], report: Progress | None) -> dict[str, Launcher | Exception]:
        ways = [o.made for o in offers if isinstance(o.made, batched.Way)]
        single = [o.made for o in offers if not isinstance(o.made, batched.Way)]
        every = {c.key: c for c in (*single, *(c for way in ways for c in way.candidates))}
        built = self.code.build(list(every.values()), report)
        for way in ways:
            built[way.key] = batched.launcher(way, built, lambda c: self.code.build([c])[c.key])
        return built


@register_provider
class Cublas(Provider):
    """NVIDIA's matrix products, by any of the algorithms that the library proposes."""

    name, devices, below = "cublas", ("cuda",), "aten"
    alone = ("step.contract",)

    def at_once(self, region: Region) -> bool:
        return True

    @property
    def version(self) -> str:
        home = Path(cublas_ways.__file__).parent
        files = [*sorted(home.glob("*.py")), home.parent / "matrices.py"]
        return f"{version_of(files)} {cublas_library.LIBRARY.version()}"

    def claims(self, region: Region) -> str:
        return cublas_ways.why_not(region)

    def offers(self, region: Region) -> list[Offer]:
        found = []
        for number, way in enumerate(cublas_ways.ways(region)):
            name = f"algorithm {number}"
            found.append(Offer(name, f"cublas {region.key} {name}", cublas_ways.scratch_of(way), way))
        return found

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        return {o.key: o.made for o in offers}


@register_provider
class Cudnn(Provider):
    """NVIDIA's attention and convolutions, with results where the plan wants them."""

    name, devices, below = "cudnn", ("cuda",), "aten"
    alone = cudnn_ways.OPS

    def at_once(self, region: Region) -> bool:
        return cudnn_ways.is_convolution(region)

    @property
    def version(self) -> str:
        files = Path(cudnn_ways.__file__).parent.glob("*.py")
        return f"{version_of(sorted(files))} {cudnn_library.LIBRARY.version()}"

    def claims(self, region: Region) -> str:
        return cudnn_ways.why_not(region)

    def offers(self, region: Region) -> list[Offer]:
        found = []
        for way in cudnn_ways.ways(region):
            name = f"engine {way.engine.number}"
            found.append(Offer(name, f"cudnn {region.key} {name}", way.scratch, way))
        return found

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        found: dict[str, Launcher | Exception] = {}
        for done, offer in enumerate(offers):
            try:
                found[offer.key] = offer.made.build()
            except RuntimeError as error:  # the library says why it cannot
                found[offer.key] = error
            if report is not None:
                report(done + 1, len(offers))
        return found


@register_provider
class Triton(Generator):
    """Kernels that we generate for NVIDIA GPUs."""

    name, package, devices = "triton", "triton.generate", ("cuda",)
    batching = "triton.batches"
    templates = ("depthwise", "embedding", "windows")
    written_by = ("loops", "attention_sides")
    attends = True

    def absent(self) -> str:
        if importlib.util.find_spec("triton") is not None:
            return ""
        return "no GPU kernels are generated (the package triton is not installed): ATen runs everything op by op"

    def why_no_product(self, region: Region) -> str:
        family = importlib.import_module("wholestep.backends.triton.contraction")
        return family.why_not(region.kernel, region.specs)

    @cached_property
    def written(self) -> list[Any]:
        return super().written if importlib.util.find_spec("triton") is not None else []

    def offer(self, region: Region, name: str) -> Offer | None:
        """The way of that name; of a loop kernel the others are not written."""
        if has_attention(region):
            return next(iter(self.around_attention(region, name)), None)
        if region.parts or region.kernel is None or self.template(region) is not None:
            return super().offer(region, name)
        found = self.code.candidates(region.kernel, region.specs, name)
        return next(map(Unwritten, found), None)

    def offers(self, region: Region) -> list[Offer]:
        if has_attention(region):
            return self.around_attention(region)
        if region.parts or self.template(region) is not None:
            return super().offers(region)
        return list(map(Unwritten, self.code.candidates(region.kernel, region.specs)))

    def around_attention(self, region: Region, only: str = "") -> list[Offer]:
        """Ways to run an attention with the loops around it, all or the one of a name."""
        family = importlib.import_module("wholestep.backends.triton.attention")
        found = family.candidates(region.body, region.specs, only)
        return [Offer(c.name, c.key, tuple(c.scratch), c) for c in found]

    def claims(self, region: Region) -> str:
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if has_attention(region):
            family = importlib.import_module("wholestep.backends.triton.attention")
            return family.why_not(region.body, region.specs)
        return super().claims(region)


@register_provider
class Wgmma(Provider):
    """Matrix products and convolutions that we generate for Hopper GPUs in CUDA C++, with what follows them inside."""

    name, devices, below, compiled_by = "wgmma", ("cuda",), "triton", "triton"
    alone = wgmma_ways.OPS

    def follows(self, region: Region | None = None) -> bool:
        return not wgmma_ways.why_absent() if region is None else wgmma_ways.is_wide(region)

    @cached_property
    def version(self) -> str:  # type: ignore[override]
        here = Path(wgmma_ways.__file__).parent
        files = [*here.glob("*.py"), *here.glob("*.cu"), here.parent / "triton" / "contraction.py"]
        return f"{version_of(sorted(files))} {wgmma_library.version()}"

    def claims(self, region: Region) -> str:
        return wgmma_ways.why_not(region)

    def offers(self, region: Region) -> list[Offer]:
        found = wgmma_ways.ways(region)
        return [Offer(w.name, f"wgmma {region.key} {w.name}", w.product.scratch, w) for w in found]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        built = wgmma_ways.build([o.made for o in offers], report)
        return {o.key: made for o, made in zip(offers, built, strict=True)}


@register_provider
class Cpp(Generator):
    """Kernels that we generate for CPUs."""

    name, package, devices = "cpp", "cpp", ("cpu",)
    batching = "cpp.batches"
    templates = ("cpp.convolution", "cpp.embedding")
    lone_templates = ("cpp.product", "cpp.grouped", "cpp.attention")
    helpers = ("convolution_ops", "embedding", "matrices")
    alone = ("step.contract", "step.grouped_contract", "step.attention", "step.attention_grad")

    def at_once(self, region: Region) -> bool:
        return self.template(region) is not None

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        """What templates run, which is long, compiles beside what is generated; what fails there is told by whoever
        asks for it then."""
        asked = [t for t in (*self.written, *self.lone) if any(isinstance(o.made, t.Way) for o in offers)]
        texts = [c for t in asked for c in t.kernels()]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.code.build, texts)
            return super().build(offers, report)

    def absent(self) -> str:
        return self.code.missing()


@register_provider
class Inductor(Provider):
    """PyTorch's own compiler, region by region."""

    name = "inductor"
    version = ""
    slow = True

    def claims(self, region: Region) -> str:
        if region.parts:
            return "it is a batch"
        if any(op.name in ("step.opaque", "step.random") for op in region.ops):
            return "it does not know every op of the region"
        return ""

    def offers(self, region: Region) -> list[Offer]:
        return [Offer("inductor", f"inductor {region.key}", made=region)]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        found: dict[str, Launcher | Exception] = {}
        for done, offer in enumerate(offers):
            try:
                found[offer.key] = self.compiled(offer.made)
            except Exception as error:  # another compiler: whatever it says is a reason not to take it
                found[offer.key] = error
            if report is not None:
                report(done + 1, len(offers))
        return found

    def compiled(self, region: Region) -> Launcher:
        """What PyTorch makes of a region. It compiles when it is called: that is done here, so that what fails does so
        where somebody else can be taken, and not in a step."""
        rounds = any(op.attributes.get("rounds") for op in region.ops)  # Inductor leaves that out unless it is told
        options: Any = {"emulate_precision_casts": True} if rounds else None
        code = with_own_code(copying(op_by_op(region), len(region.operands)))
        run: Launcher = torch.no_grad()(torch.compile(code, dynamic=False, fullgraph=True, options=options))
        if not looks_up_what_it_computes(region):
            laid = [(s.shape, s.strides, s.dtype) for s in region.results]
            results = [torch.empty_strided(n, st, dtype=d, device=region.device) for n, st, d in laid]
            run(*neutral_inputs(region, False), *results)
        return run


def with_own_code(function: Any) -> Launcher:
    """The same function by a copy of its code: PyTorch compiles one piece of code for eight cases at most."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def spec_of_type(type: Any, strides: tuple[int, ...]) -> Spec:
    return Spec(type.shape, strides, torch_dtype(type.element))


def is_constant(value: Any) -> bool:
    return constant_value(value) is not None
