"""The zoo: tiny networks of many families on which the compiled step must train exactly as eager PyTorch does.

`ZOO` maps a name to its entry. `KNOWN_FAILURES` holds those that torch.export cannot capture, with `entry.failure`
saying why; they are not in `ZOO`.
"""

from .entry import Batch, Entry
from .own_models import OWN
from .transformers_models import TRANSFORMERS, UNCAPTURABLE

ZOO: dict[str, Entry] = {entry.name: entry for entry in (*TRANSFORMERS, *OWN)}
KNOWN_FAILURES: dict[str, Entry] = {entry.name: entry for entry in UNCAPTURABLE}

__all__ = ["KNOWN_FAILURES", "OWN", "TRANSFORMERS", "ZOO", "Batch", "Entry"]
