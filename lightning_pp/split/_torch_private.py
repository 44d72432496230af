"""The private names of torch that tell which function mode is on top, and take it off for a while.

Checked with torch 2.11 and 2.13.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.overrides

current_function_mode: Any = torch.overrides._get_current_function_mode
"""The function mode on top; None where there is none."""

_pop: Any = torch.overrides._pop_mode_temporarily


def without_current_function_mode() -> AbstractContextManager[Any]:
    """Within, the function mode on top is off."""
    popped: AbstractContextManager[Any] = _pop()
    return popped
