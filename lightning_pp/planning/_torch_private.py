"""The private names of torch that planning uses; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from typing import Any

from lightning_pp._private_names import private

# the classes of what is in ``torch.ops``
OPERATION_TYPES: tuple[Any, Any] = (private("torch._ops.OpOverload"), private("torch._ops.HigherOrderOperator"))
