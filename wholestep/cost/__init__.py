"""What a step costs before it runs: the ledger of bytes, the fused bound, time on a described machine, memory in use.

Everything is computed from the executed form of the program (`Executed`); nothing is run.
"""

from .bound import Bound, fused_bound
from .ledger import CAUSES, Kernel, Ledger, Move, layer_group, make_ledger
from .movement import Movement, movement_of
from .roofline import Roofline, roofline
from .storage import Executed

__all__ = [
    "CAUSES",
    "Bound",
    "Executed",
    "Kernel",
    "Ledger",
    "Move",
    "Movement",
    "Roofline",
    "fused_bound",
    "layer_group",
    "make_ledger",
    "movement_of",
    "roofline",
]
