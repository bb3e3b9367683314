"""What a step costs before it runs: the ledger of bytes, the fused bound, time on a described machine, memory in use.

Everything is computed from the plan of the program and the operators that its launches run, the bound from the program
as it was captured; nothing is run.
"""

from .bound import Bound, fused_bound, note_bound
from .counting import make_ledger
from .ledger import CAUSES, Kernel, Ledger, Move, layer_group
from .movement import Movement, movement_of
from .roofline import Roofline, roofline

__all__ = [
    "CAUSES",
    "Bound",
    "Kernel",
    "Ledger",
    "Move",
    "Movement",
    "Roofline",
    "fused_bound",
    "layer_group",
    "make_ledger",
    "movement_of",
    "note_bound",
    "roofline",
]
