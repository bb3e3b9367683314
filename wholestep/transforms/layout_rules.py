"""What is known of layouts beside the decision (`layout.py`): which ops follow the layout of what they read, how two
layouts differ, and what a convolution and a copy are modelled to cost where nobody has timed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dialects.step.convolution import ConvolutionLike
from ..dialects.step.optimizers import OptimizerUpdate
from ..dialects.strides import same_places, strides_in
from ..ir.core import Op, Value

Order = tuple[int, ...]

#: ops that write as they read, beside pointwise ones and updates; the second no sequences, the third only images, the
#: fourth as loops, which is how GPUs run them
FOLLOW = frozenset(
    ("step.concat", *(f"step.{name}_norm{grad}" for name in ("batch", "group") for grad in ("", "_grad")))
)
FOLLOW_WIDE = frozenset({"step.max_pool", "step.max_pool_grad", "step.pad"})
FOLLOW_IMAGES = frozenset(
    (
        "step.upsample_cells_grad",
        *(
            f"step.{name}{grad}"
            for name in ("avg_pool", "adaptive_avg_pool", "upsample", "repeat_pixels")
            for grad in ("", "_grad")
        ),
    )
)
FOLLOW_AS_LOOPS = frozenset({"step.cross_entropy_grad"})


@dataclass(frozen=True, slots=True)
class Preference:
    """What a convolution costs more without channels-last, as a share of copying all its tensors once.

    1 is what a library pays that converts them by itself, as cuDNN does for its tensor-core kernels; our kernels for
    depthwise convolutions take channels-last alone (those of sequences run as well without). `launch` is what one more
    kernel costs beside its bytes, in bytes: by default 1.1 us (a kernel of a CUDA graph) at 4.2 TB/s, as
    machine/h200.json has them.
    """

    convolution: float = 1.0
    depthwise: float = 1.0
    elements: tuple[str, ...] = ("bf16", "f16", "f32")
    launch: int = 4_600_000

    def share(self, op: Op) -> float:
        if op.operands[0].type.element.text not in self.elements:
            return 0.0
        if is_depthwise(op):
            return self.depthwise if is_wide(op) else 0.0
        return self.convolution

    def copy(self, value: Value) -> int:
        """The cost of a copy in another layout; nothing where that copy runs anyway."""
        moved = conversion(value)
        return moved + self.launch if moved else 0


def channels_last(rank: int) -> Order:
    return (0, *range(2, rank), 1)


def differ(shape: Sequence[int], one: Order, other: Order) -> bool:
    """Whether two orders put elements at different places: one channel, or one pixel, lies the same in both."""
    return 0 not in shape and not same_places(shape, strides_in(shape, one), strides_in(shape, other))


def is_convolution(op: Op) -> bool:
    """A convolution, or a gradient of one."""
    return issubclass(op.definition, ConvolutionLike)


def is_wide(op: Op) -> bool:
    """A convolution of images or volumes, or a gradient of one."""
    return is_convolution(op) and len(op.stride) >= 2


def is_depthwise(op: Op) -> bool:
    shape = op.weight_shape if "weight_shape" in op.attributes else op.w.type.shape
    return op.groups > 1 and shape[1] == 1 and op.groups == shape[0]


def repeats_images(op: Op) -> bool:
    """Whether what a broadcast repeats has both channels and pixels."""
    shape, rank = op.operands[0].type.shape, op.result.type.rank
    rows = tuple(range(rank))
    return rank in (3, 4, 5) and differ((1,) * (rank - len(shape)) + shape, rows, channels_last(rank))


def follows(op: Op, rank: int) -> bool:
    """Whether the op writes in the layout that it reads, where all it reads lie alike."""
    definition, name = op.definition, op.name
    if name == "step.opaque":
        return rank == 4 and str(op.attributes.get("target", "")).startswith("aten.upsample_")
    return (
        getattr(definition, "pointwise", False)
        or issubclass(definition, OptimizerUpdate | ConvolutionLike)
        or name in FOLLOW
        or name in FOLLOW_AS_LOOPS
        or (name in FOLLOW_WIDE and rank >= 4)
        or (name in FOLLOW_IMAGES and rank == 4)
    )


def conversion(value: Value) -> int:
    """Bytes that a copy of a value in another layout moves, beyond what is moved anyway."""
    op = value.op
    if op is not None and op.name == "step.cast":
        have, want, users = op.operands[0].type.element, value.type.element, list(value.uses)
        if have.kind == want.kind == "float" and have.bits < want.bits and len(users) == 1:
            # the copy does the cast, which would have run by itself unless its reader does it on the way
            reader_casts = getattr(users[0].definition, "converts", False)
            return op.operands[0].type.bytes + value.type.bytes if reader_casts else 0
    return 2 * value.type.bytes
