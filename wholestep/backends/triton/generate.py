"""Kernels of the loop dialect as Triton: what a kernel can be written as, and the built, ready callables.

`candidates` names the configurations worth timing, whose source is written when they are tried; `build` compiles them
in worker processes and gives callables that only launch. With TRITON_INTERPRET=1 the same source runs in Triton's
interpreter on CPU tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ...dialects.loop import NoSchedule
from ...ir.core import Op
from ..batched import Way
from ..kernels import Spec
from .configs import configs
from .families import Family, Function, Generated, unsupported
from .scalars import POINTERS, NoText
from .walk import Latest, Walk

if TYPE_CHECKING:
    from .compiling import CompileInfo

C = TypeVar("C", contravariant=True)
#: what the generator is compiled for where no GPU says otherwise
CAPABILITY = 90
#: the function of a batched source for tensors that start at any element
UNALIGNED = "batch_unaligned"


@dataclass(frozen=True)
class Batched:
    """Kernels that one launch runs: how many points each has, tensors per kernel, points per program."""

    sizes: tuple[int, ...]
    tensors: int
    block: int

    @property
    def blocks(self) -> int:
        return sum(-(-n // self.block) for n in self.sizes)


@dataclass(frozen=True)
class Candidate:
    """One way to run a kernel: its source, and the memory it needs beside its arguments."""

    name: str
    scratch: tuple[Spec, ...]
    key: str
    source: str
    functions: tuple[Function, ...]
    #: Triton's pointer types of arguments and scratch
    pointers: tuple[str, ...]
    #: of several kernels in one launch
    batched: Batched | None = None
    #: whether it may beat the best guess
    likely: bool = True


#: what a draft does not know
WRITTEN = ("scratch", "key", "source", "functions", "pointers")


class Draft(Candidate):
    """A way that is written when something but its name is asked for: most of them are never tried."""

    def __init__(self, name: str, write: Callable[[], Candidate], likely: bool = True):
        vars(self).update(name=name, write=write, batched=None, likely=likely)

    def __getattr__(self, name: str) -> Any:
        if name not in WRITTEN:
            raise AttributeError(name)
        made = vars(self)["write"]()
        vars(self).update({each: getattr(made, each) for each in WRITTEN})
        del vars(self)["write"]  # and all that it was written from
        return vars(self)[name]


#: what a kernel needs that is no product
family_of = Latest(Family)


def why_not(function: Op, specs: Sequence[Spec]) -> str:
    """ "" if the kernel can be generated, else a reason for a user."""
    from . import contraction

    if not contraction.why_not(function, specs):
        return ""
    reason = unsupported(specs, function)
    if reason:
        return reason
    try:
        family = family_of(function, specs)
        if not configs(family):
            return "no block sizes fit"
        family.generate(configs(family)[0])
    except (NoText, NoSchedule) as error:
        return str(error)
    return ""


def candidates(function: Op, specs: Sequence[Spec], only: str = "") -> list[Candidate]:
    """The best guess first, then alternatives worth timing. only: nothing but the one of that name."""
    from . import contraction

    if not contraction.why_not(function, specs):
        found = contraction.candidates(function, specs)
    else:
        family = family_of(function, specs)
        found = [draft(family, config, str(config)) for config in configs(family)]
    return [c for c in found if only in ("", c.name)]


class Writer(Protocol[C]):
    """A kernel that can be written in configurations."""

    walk: Walk

    def generate(self, config: C) -> Generated: ...


def draft(family: Writer[C], config: C, name: str, likely: bool = True) -> Candidate:
    """One configuration of a kernel, to be written when it is tried."""
    return Draft(name, lambda: candidate(family, config), likely)


def candidate(family: Writer[C], config: C) -> Candidate:
    """One configuration of a kernel."""
    made = family.generate(config)
    elements = [str(a.type.element) for a in family.walk.block.arguments]
    scratch = [{torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16",
                torch.int8: "i8", torch.uint8: "ui8"}[s.dtype] for s in made.scratch]  # fmt: skip
    pointers = tuple(POINTERS[e] for e in (*elements, *scratch))
    return Candidate(
        str(config), made.scratch, digest(made.source, made.functions, pointers), made.source, made.functions, pointers
    )


def batch_key(function: Op, specs: Sequence[Spec]) -> str:
    """Kernels with the same key can be batched; "" where a kernel cannot be."""
    from .batch import key

    return key(function, specs)


def batch(kernels: Sequence[tuple[Op, Sequence[Spec]]]) -> Candidate:
    """Pointwise kernels with the same body as one launch. Its callable takes the tensors of all, kernel by kernel."""
    from .batch import batch

    return batch(kernels)


def digest(source: str, functions: Sequence[Function], pointers: Sequence[str], more: object = None) -> str:
    """Equal kernels have equal keys."""
    content = [source, [asdict(f) for f in functions], list(pointers), target(), more]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def target() -> str:
    """What kernels are built for."""
    if interpreting():
        return "interpreter"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda:{10 * major + minor}"
    return f"cuda:{CAPABILITY}"


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def build(
    candidates: Sequence[Candidate], report: Callable[[int, int], None] | None = None
) -> dict[str, Callable[..., None] | Exception]:
    """A callable per key, or the exception that says why there is none."""
    from .launch import interpreted, native

    return interpreted(candidates, report) if interpreting() else native(candidates, report)


class Ahead:
    """Compiles what was offered while the caller does something else; what is built then is found compiled."""

    def __init__(self) -> None:
        from .compiling import Compilers, cores

        self.compilers = Compilers(max(1, cores() - 1))  # one is left to the caller, who measures
        major, minor = torch.cuda.get_device_capability()
        self.capability = 10 * major + minor

    def start(self) -> None:
        """Gets compilers ready."""
        self.compilers.start()

    def add(self, offered: Iterable[object], perhaps: bool = False) -> frozenset[str]:
        """Begins to compile what was offered, one after the other; `perhaps`: what may be asked for later goes last.

        What is no kernel of Triton's says itself what there is to do for it (`jobs`).
        """
        given = list(offered)
        others = [made for made in given if hasattr(made, "jobs")]
        jobs = jobs_of((made for made in given if not hasattr(made, "jobs")), self.capability)
        jobs |= {key: job for made in others for key, job in made.jobs().items()}  # type: ignore[attr-defined]
        self.compilers.add(jobs, perhaps)
        return frozenset(jobs)

    def first_done(self, begun: Sequence[frozenset[str]]) -> int:
        """Waits until all of something that was begun is compiled, or is known not to compile: which."""
        return self.compilers.first_done(begun)

    def drop(self) -> None:
        """Forgets what was not begun yet."""
        self.compilers.drop()


def ahead() -> Ahead | None:
    """What compiles ahead of `build`; None where nothing is compiled."""
    return None if interpreting() or not torch.cuda.is_available() else Ahead()


def jobs_of(offered: Iterable[object], capability: int) -> dict[str, dict[str, Any]]:
    """What has to be compiled for candidates, for batches of them and for templates."""
    from .compiling import digest, job_of

    jobs: list[dict[str, Any]] = []
    for made in offered:
        if isinstance(made, Candidate):
            jobs += [job_of(made, f, capability) for f in made.functions if f.grid]
        elif isinstance(made, Way):
            jobs += jobs_of(made.candidates, capability).values()
        else:
            jobs += [f.job(capability) for f in made.functions]  # type: ignore[attr-defined]
    return {digest(job): job for job in jobs}


def compile_for(
    candidates: Sequence[Candidate], capability: int = CAPABILITY, report: Callable[[int, int], None] | None = None
) -> dict[str, CompileInfo | Exception]:
    """Compiles without a GPU, for a compute capability: what each candidate needs, or why it does not compile."""
    from .compiling import compile_for

    return compile_for(candidates, capability, report)
