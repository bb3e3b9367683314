"""Where the calls of a captured model come from, at little cost: one line of the user's per call, not the whole stack.

torch.export looks up the text of every line on the stack of every call, and then keeps those in methods `forward`. All
that is read of them later is the innermost one outside of torch (`Importer.frame`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.fx.proxy

#: folders whose code is not the user's
_INNER = tuple(os.path.dirname(str(file)) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))


class UserLine:
    """In place of torch's `CapturedTraceback`, as far as `torch.fx` uses it."""

    def __init__(self, whole: Any):
        self.whole = whole

    def extract(self, *args: Any, **options: Any) -> UserLine:
        return self

    def summary(self) -> traceback.StackSummary:
        """The line as the only frame; the whole stack where no `forward` of the user's is on it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and not code.co_filename.startswith(_INNER):
                line = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, line="")
                return traceback.StackSummary.from_list([line])
            frame = frame.f_back
        found: traceback.StackSummary = self.whole.extract().summary()
        return found


@contextmanager
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
