"""The private names of torch that planning uses; nothing else in this layer uses any.

Tried with torch 2.11 to 2.13. Importing fails, and says which name is missing, where a version has one no longer.
"""

from __future__ import annotations

from typing import Any

from torch import _ops

from lightning_pp._private_names import private

# the classes of what is in ``torch.ops``
OPERATION_TYPES: tuple[Any, Any] = (private(_ops, "OpOverload"), private(_ops, "HigherOrderOperator"))
