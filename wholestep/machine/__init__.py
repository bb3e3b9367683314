"""What this machine can do, and what must be set before torch touches it.

`protect` keeps bf16 on the CPU from dying where AMX is announced but not granted; `machine.describe` makes the record
that `wholestep doctor` prints. Importing this package imports no torch.
"""

from wholestep.machine.cpu import Amx, protect

__all__ = ["Amx", "protect"]
