"""Private torch API stays in wholestep/torch_private.py, so that a new torch is one file's work."""

from __future__ import annotations

import ast
from pathlib import Path

import wholestep

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
