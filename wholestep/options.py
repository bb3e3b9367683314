"""What a user may choose about a step: one frozen record, checked before anything is compiled, saved as plain JSON."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import InputError

PRECISIONS = ("fp32", "bf16", "fp16")
SHAPES = ("static", "bucket")
UPDATES = ("in_step", "in_next_forward", "beside_next_forward")
#: bytes in the units of a memory budget
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Scaling:
    """How the loss scale of fp16 training moves; the names and defaults of `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True)
class Options:
    """The options of `ws.compile`; its documentation says what each does."""

    precision: Any = "fp32"
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    skip_nonfinite: bool = False
    loss_scale: Scaling = Scaling()
    ema: float | None = None
    updates: str = "in_step"
    shapes: str = "static"
    max_variants: int = 8
    pad: Mapping[str, float] | None = None
    #: transformations up to this level are taken by themselves; 0 also runs the program without a plan
    level: int = 3
    #: bytes as an int, or as a float a share of the peak without a budget; a text such as "24GB" becomes an int
    memory_budget: int | float | None = None
    #: who may run regions, by name; None for everybody that is there and does not have to be asked for
    providers: tuple[str, ...] | None = None
    #: whether competing kernels are timed on this machine; otherwise the best guess is taken
    tune: bool | str = True
    recipe: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    #: the name of a registered policy, which picks among what is left to do
    policy: str | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, Mapping):
            known = [f.name for f in fields(Scaling)]
            for key in self.loss_scale:
                if key not in known:
                    raise InputError(f"loss_scale has no setting {key!r}; its settings are {', '.join(known)}")
            object.__setattr__(self, "loss_scale", Scaling(**self.loss_scale))
        elif is_number(self.loss_scale):
            object.__setattr__(self, "loss_scale", Scaling(init_scale=float(self.loss_scale)))  # type: ignore[arg-type]
        for name in ("recipe", "force", "forbid"):
            value = getattr(self, name)
            keys = texts_in(value)
            if keys is None:
                raise InputError(f"{name} is a list of keys such as 'recompute */gelu#*', not {value!r}")
            object.__setattr__(self, name, keys)
        if self.providers is not None:
            names = texts_in(self.providers)
            if names is None:
                raise InputError(f'providers is a list of names such as ["aten", "triton"], not {self.providers!r}')
            object.__setattr__(self, "providers", names)
        object.__setattr__(self, "memory_budget", parse_budget(self.memory_budget))
        if isinstance(self.level, bool) or self.level not in range(5):
            raise InputError(f"level is 0 (as written), 1, 2, 3 or 4 (all transformations), not {self.level!r}")
        if self.memory_budget is not None and self.level < 3:
            raise InputError(
                f"memory_budget computes values again, which is a change of level 3, and level={self.level}: "
                "give level=3 or 4, or leave memory_budget out"
            )
        if self.policy is not None and not isinstance(self.policy, str):
            raise InputError(f"policy is the name of a policy that was registered, not {self.policy!r}")
        if self.policy is not None and not self.level:
            raise InputError(f"policy={self.policy!r} picks transformations, and level=0 takes none")
        self._check_updates()
        self._check_clipping()
        self._check_scaling()
        if not is_count(self.accumulate):
            raise InputError(f"accumulate must be a positive number of micro-batches, not {self.accumulate!r}")
        if not is_count(self.max_variants):
            raise InputError(f"max_variants must be a positive number of compiled shapes, not {self.max_variants!r}")
        for name in ("skip_nonfinite", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is True or False, not {getattr(self, name)!r}")
        if self.tune not in (True, False, "max"):
            raise InputError(f'tune is True, False or "max" (tries more, and takes longer), not {self.tune!r}')
        if self.ema is not None and not (is_number(self.ema) and 0 <= self.ema < 1):
            raise InputError(f"ema is the decay of the average, from 0 up to but not including 1, not {self.ema!r}")
        if self.shapes not in SHAPES:
            hint = near(self.shapes, SHAPES)
            raise InputError(f"shapes must be one of {', '.join(SHAPES)}, not {self.shapes!r}{hint}")
        if self.pad is not None and not (
            isinstance(self.pad, Mapping) and all(isinstance(k, str) and is_number(v) for k, v in self.pad.items())
        ):
            raise InputError('pad maps names of the batch to the number they are padded with, such as {"labels": -100}')
        if self.pad and self.shapes != "bucket":
            raise InputError('pad= only has a meaning with shapes="bucket"')

    @property
    def late(self) -> bool:
        """Whether a step leaves its update to the next one."""
        return self.updates != "in_step"

    def _check_updates(self) -> None:
        if self.updates not in UPDATES:
            hint = near(self.updates, UPDATES)
            raise InputError(f"updates must be one of {', '.join(UPDATES)}, not {self.updates!r}{hint}")
        if self.late and self.memory_budget is not None:
            raise InputError(
                f"updates={self.updates!r} keeps all gradients between steps, and memory_budget decides about a step "
                'that does not: leave one of them out (updates="in_step" needs the least memory)'
            )

    def _check_clipping(self) -> None:
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise InputError(f"{name} must be a positive number, not {value!r}; leave it out for no clipping")
        if self.clip_norm is not None and self.clip_value is not None:
            raise InputError("clip_norm and clip_value are both given: clip by one of them")

    def _check_scaling(self) -> None:
        scale = self.loss_scale
        if not isinstance(scale, Scaling):
            raise InputError(f"loss_scale is a number or the settings of torch.amp.GradScaler, not {scale!r}")
        if not (is_number(scale.init_scale) and 0 < scale.init_scale < math.inf):
            raise InputError(f"the first loss scale must be positive and finite, not {scale.init_scale!r}")
        if not (is_number(scale.growth_factor) and 1 < scale.growth_factor < math.inf):
            raise InputError(f"growth_factor must be greater than 1, not {scale.growth_factor!r}")
        if not (is_number(scale.backoff_factor) and 0 < scale.backoff_factor < 1):
            raise InputError(f"backoff_factor must lie between 0 and 1, not {scale.backoff_factor!r}")
        if not is_count(scale.growth_interval):
            raise InputError(f"growth_interval must be a positive number of steps, not {scale.growth_interval!r}")

    def to_json(self) -> dict[str, Any]:
        """The options as plain values."""
        found = asdict(self)
        found["pad"] = dict(self.pad) if self.pad else None
        return found

    @classmethod
    def from_json(cls, found: Any) -> Options:
        """Options from plain values; InputError where they are none."""
        known = [f.name for f in fields(cls)]
        if not isinstance(found, dict) or any(k not in known for k in found):
            raise InputError(f"options must be a dictionary of {', '.join(known)}")
        return cls(**found)


def parse_budget(given: Any) -> int | float | None:
    """A memory budget in bytes (an int) or as a share (a float); InputError where it is neither."""
    if given is None or is_count(given):
        return given
    if isinstance(given, float) and 0 < given <= 1:
        return given
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", given)
        if match and match[2].upper() in UNITS and float(match[1]) > 0:
            return int(float(match[1]) * UNITS[match[2].upper()])
    raise InputError(
        f'memory_budget is a size such as "24GB" or "500MiB", a number of bytes, or a share of the step\'s peak as a '
        f"float above 0 and up to 1.0, not {given!r}"
    )


def texts_in(given: Any) -> tuple[str, ...] | None:
    """What a list of texts holds; None where it is no such list."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return None
    found = tuple(given)
    return found if all(isinstance(text, str) for text in found) else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def near(given: Any, choices: Any) -> str:
    """A hint at what was probably meant."""
    found = difflib.get_close_matches(str(given), list(choices), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
