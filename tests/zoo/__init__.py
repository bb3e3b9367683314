"""The zoo: tiny networks of many families on which the compiled step must train exactly as eager PyTorch does.

`ZOO` maps a name to its entry. `KNOWN_FAILURES` holds those that torch.export cannot capture, with `entry.failure`
saying why; they are not in `ZOO`.
"""

from .entry import Batch, Entry
from .own_models import OWN
from .own_models import UNCAPTURABLE as OWN_UNCAPTURABLE
from .transformers_models import TRANSFORMERS
from .transformers_models import UNCAPTURABLE as TRANSFORMERS_UNCAPTURABLE

ZOO: dict[str, Entry] = {entry.name: entry for entry in (*TRANSFORMERS, *OWN)}
KNOWN_FAILURES: dict[str, Entry] = {entry.name: entry for entry in (*TRANSFORMERS_UNCAPTURABLE, *OWN_UNCAPTURABLE)}

__all__ = ["KNOWN_FAILURES", "OWN", "TRANSFORMERS", "ZOO", "Batch", "Entry"]
