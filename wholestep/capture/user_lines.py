"""Where the calls of a captured model come from, at little cost: one line of the user's per call, not the whole stack.

torch.export looks up the text of every line on the stack of every call, and then keeps those in methods `forward`. All
that is read of them later is the innermost one outside of torch (`Importer.frame`). What a loss function computes by
itself has none: that is at the function's own line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.fx.proxy

#: this folder, and where else code is not the user's: torch, this package, and what calls a decorated function
_HERE = os.path.dirname(__file__) + os.sep
_INNER = (*(os.path.dirname(str(f)) + os.sep for f in (torch.__file__, os.path.dirname(__file__))), contextlib.__file__)


class UserLine:
    """In place of torch's `CapturedTraceback`, as far as `torch.fx` uses it."""

    def __init__(self, whole: Any):
        self.whole = whole

    def extract(self, *args: Any, **options: Any) -> UserLine:
        return self

    def summary(self) -> traceback.StackSummary:
        """The line as the only frame; the whole stack where a layer of torch is all that is captured."""
        frame: FrameType | None = sys._getframe(1)
        users: FrameType | None = None  # the outermost so far
        loss: FrameType | None = None  # the same of all code but ours: in the end a loss function of torch's
        in_layer = False
        while frame is not None:
            file, is_forward = frame.f_code.co_filename, frame.f_code.co_name == "forward"
            if not file.startswith(_INNER):
                users = frame
                if is_forward:
                    break
            if not file.startswith(_HERE):
                loss = frame
                in_layer |= is_forward
            elif is_forward:  # it calls the model and the loss: what is beyond calls us
                break
            frame = frame.f_back
        found = users if users is not None or in_layer else loss
        if frame is None or found is None:
            whole: traceback.StackSummary = self.whole.extract().summary()
            return whole
        # torch keeps frames of this name alone
        line = traceback.FrameSummary(found.f_code.co_filename, found.f_lineno, "forward", line="")
        return traceback.StackSummary.from_list([line])


@contextlib.contextmanager
def user_lines_only() -> Iterator[None]:
    """While this is entered, traced calls note one line. A torch that takes its stacks elsewhere is left as it is."""
    whole = getattr(torch.fx.proxy, "CapturedTraceback", None)
    if whole is None:
        yield
        return
    torch.fx.proxy.CapturedTraceback = UserLine(whole)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.fx.proxy.CapturedTraceback = whole  # type: ignore[misc]
