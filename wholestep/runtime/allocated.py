"""What launches allocate beside the plan's memory, as the first step shows it: a provider may make tensors that nobody
planned. A GPU's allocator counts what it hands out (`cuda_graph.py`), the one for CPUs reports it (`calls.Counted`)."""

from __future__ import annotations

import warnings

from ..cost.movement import size_text
from ..plan.plan import Launch

#: bytes that a kernel may take unplanned without being mentioned: the allocator rounds up
SLACK = 1 << 20


class Allocated:
    """Notes of the first step."""

    def __init__(self) -> None:
        #: the most bytes that one launch took while it ran, and those that all of them kept
        self.most = self.kept = 0
        #: ops whose kernels took more memory than the plan knew of, and how many bytes more
        self.unplanned: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes that kernels took beside the plan's memory."""
        return self.most + self.kept

    def note(self, launch: Launch | None, handed: int, growth: int, body: int = 0) -> None:
        """A call for which an allocator handed out some bytes, after which so many more are in use than before.

        launch: what it belongs to; None for calls that are not the program's own. body: what is known to be made by
        the launches inside of it.
        """
        stays = max(0, growth)
        taken = handed - stays
        self.kept += stays
        self.most = max(self.most, taken)
        if launch is None:
            return
        more = taken - max(launch.makes, launch.takes, body)
        if more <= SLACK:
            return
        if launch.name not in self.unplanned and launch.provider not in ("aten", "micro_batches"):
            warnings.warn(
                f"provider {launch.provider!r} makes {size_text(taken)} of its own while it runs {launch.name} of "
                f"layer {launch.layer or '(none)'}: the step needs {size_text(more)} more than its plan says.\n"
                'Try: ask for that memory as scratch= of the Offer (docs/kernels.md, "A provider of your own"), which '
                "is planned, or leave the provider out of providers=",
                stacklevel=2,
            )
        self.unplanned[launch.name] = max(self.unplanned.get(launch.name, 0), more)
