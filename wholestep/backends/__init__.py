"""Who runs an op. A provider turns an op into a callable on tensors; `aten` runs anything."""

from __future__ import annotations
