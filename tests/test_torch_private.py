"""Private torch API stays in wholestep/torch_private.py, so that a new torch is one file's work."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import wholestep
from wholestep.torch_private import foreach_copy

PACKAGE = Path(wholestep.__file__).parent
PRIVATE_MODULES = ("torch._", "torch.fx.experimental", "torch.utils._", "torch.testing._")


def private_uses(path: Path) -> list[str]:
    """Imports of private torch modules and attributes such as `torch._C` or `x._schema` in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE_MODULES):
            found.append(f"{path.name}:{node.lineno} from {node.module}")
        elif isinstance(node, ast.Import):
            found += [f"{path.name}:{node.lineno} {a.name}" for a in node.names if a.name.startswith(PRIVATE_MODULES)]
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            dunder = dotted.startswith("torch.__")  # torch.__version__ is public
            if (dotted.startswith(PRIVATE_MODULES) and not dunder) or node.attr == "_schema":
                found.append(f"{path.name}:{node.lineno} {dotted}")
    return found


def test_private_api_is_in_one_module() -> None:
    files = [p for p in PACKAGE.rglob("*.py") if p.name != "torch_private.py"]
    assert len(files) > 50
    assert [use for path in sorted(files) for use in private_uses(path)] == []


def test_the_check_sees_private_uses(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import torch\nfrom torch._ops import OpOverload\nx = torch._C.foo\ny = f._schema\n")
    assert len(private_uses(file)) >= 3


def test_many_copies_are_of_types_that_gpus_know(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    copies = torch._foreach_copy_

    def watched(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        asked.extend(t.dtype for t in (*into, *values))
        copies(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    state = [torch.tensor(2**63 + 5, dtype=torch.uint64), torch.tensor([7, 8], dtype=torch.uint16), torch.ones(3)]
    into = [torch.zeros_like(t) for t in state] + [torch.zeros(2)]
    foreach_copy(into, [*state, state[1]])
    assert all(torch.equal(a, b) for a, b in zip(into, [*state, torch.tensor([7.0, 8.0])], strict=True))
    assert asked and not {torch.uint16, torch.uint32, torch.uint64}.intersection(asked)
