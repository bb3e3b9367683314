"""A process that runs kernels for tests: by Triton's interpreter, or on the GPU where there is one.

Triton reads TRITON_INTERPRET once, when it is imported. A module of tests that ends with `serve(run_case)` is asked for
one case per line and answers each with a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests import warm

Ask = Callable[..., Any]


@contextmanager
def asking(module: str) -> Iterator[Ask]:
    """A function that gives its arguments to `run_case` of a module in another process."""
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert sys.__stderr__ is not None
    (read_questions, write_questions), (read_answers, write_answers) = os.pipe(), os.pipe()
    with open(write_questions, "w") as questions, open(read_answers) as answers:
        with open(read_questions) as stdin, open(write_answers, "w") as stdout:
            process = warm.start(["-m", module], os.environ | mode, stdin, stdout, sys.__stderr__)

        def ask(*arguments: Any, **named: Any) -> Any:
            print(json.dumps([arguments, named]), file=questions, flush=True)
            answer = answers.readline()
            assert answer, "the child died; its traceback is above"
            return json.loads(answer)

        yield ask
    process.wait()


def serve(run_case: Callable[..., Any]) -> None:
    """The other side."""
    for line in sys.stdin:
        arguments, named = json.loads(line)
        print(json.dumps(run_case(*arguments, **named)), flush=True)
