"""What fusion has joined in a program is kept: when the same program is compiled again, nothing is tried.

An entry is JSON with the numbers of ops, found by a hash of the program, of which of its ops may be joined, and of the
source of everything that decides. What is no such entry counts as absent.
"""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..ir.hashing import structural_hash
from .early_sums import bring

if TYPE_CHECKING:
    from .fuse import Fuser

KIND = "fusion"
#: the parts of the package that decide what is joined
DECIDING = ("transforms", "dialects", "ir")


class Keeper(Protocol):
    """Keeps bytes by kind and digest, and gives them back only if they are whole."""

    def read(self, kind: str, digest: str) -> bytes | None: ...

    def write(self, kind: str, digest: str, data: bytes) -> object: ...


@functools.cache
def source_hash() -> str:
    """Of all that decides."""
    root = Path(__file__).parent.parent
    files = sorted(file for part in DECIDING for file in (root / part).rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def digest_of(fuser: Fuser) -> str:
    """Of the program and of what may be joined in the part of it that the fuser looks at."""
    if not fuser.program:
        fuser.program = structural_hash(fuser.block)
    first = int(fuser.position[fuser.nodes[0]]) if fuser.nodes else 0
    fusible = "".join(["01"[fuser.is_fusible(op)] for op in fuser.nodes])
    text = "\n".join([source_hash(), fuser.program, str(first), fusible])
    return hashlib.sha256(text.encode()).hexdigest()


def recall(kept: Keeper, digest: str, fuser: Fuser) -> bool:
    """Joins what was joined before; whether anything is known of that."""
    data = kept.read(KIND, digest)
    nodes = fuser.nodes
    try:
        found = {} if data is None else json.loads(data)
        groups = [[nodes[i] for i in numbers if i >= 0] for numbers in found["joined"]]
        refused = [(nodes[a], nodes[b], str(why), int(gain)) for a, b, why, gain in found["refused"]]
    except (ValueError, KeyError, TypeError, IndexError):
        return False
    members = [op for group in groups for op in group]
    if len(set(members)) < len(members) or not all(map(fuser.is_fusible, members)):
        return False
    for group in groups:
        bring(fuser, group)
        fuser.unite(sorted(group, key=fuser.position.__getitem__))
    for producer, consumer, why, gain in refused:
        fuser.refuse(producer, consumer, why, gain)
    return True


def remember(kept: Keeper, digest: str, fuser: Fuser) -> None:
    """Keeps what is joined and what was refused in the part of the program that the fuser looks at."""
    number = {op: i for i, op in enumerate(fuser.nodes)}
    groups = {id(g): g for g in fuser.groups.values() if len(g.members) > 1}.values()
    joined = [[number[op] for op in g.members] for g in groups]
    refused = [[number[a], number[b], why, gain] for (a, b), (why, gain) in fuser.refused.items()]
    with suppress(OSError):  # (the next compile works it out again)
        kept.write(KIND, digest, json.dumps({"joined": joined, "refused": refused}).encode())
