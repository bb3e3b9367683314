"""What backward computes again already, before a budget asks for anything: a cheap op whose copy reads what is kept.

An op that runs again need not have such a value kept: it gets a copy of its own, from what the copy reads.
"""

from __future__ import annotations

from ..ir.core import Block
from ..transforms.kept import is_cheap
from ..transforms.recompute import originals
from ..transforms.regenerate import EARLY
from .graph import Graph


def note_copies(graph: Graph, block: Block) -> None:
    """Notes which ops are there again in backward; who reads them reads what they read, and pays for them.

    For a graph of single ops: of a kernel that does several, backward may have a copy of some.
    """
    there = {op for op in originals(block).values() if op.phase in EARLY}
    for node in graph.nodes:
        reads: list[int] = []
        for memory in node.reads:
            made = graph.memories[memory]
            maker = graph.nodes[made.node]
            if maker.there and memory == maker.makes[0]:
                reads += maker.reads
                node.seconds += maker.seconds
                node.looks += f" + {maker.looks}"  # another price: instances of a template have one
            else:
                reads.append(memory)
        node.reads = tuple(dict.fromkeys(reads))
        first = graph.memories[node.makes[0]] if node.makes else None
        if node.again and first is not None and not first.late and not first.fixed:
            node.there = len(node.ops) == 1 and node.ops[0] in there and is_cheap(node.ops[0])
