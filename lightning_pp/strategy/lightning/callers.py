"""Finds lines of the user's code, not of Lightning or this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning_pp.split.record.source_lines import UNKNOWN_LINE, line_text

_NOT_THE_USERS = ("lightning", "lightning_pp", "lightning_utilities", "torch", "contextlib", "hydra")


def line_of_user() -> str:
    """``file:line in function`` of the innermost caller that is the user's."""
    frame = inspect.currentframe()
    while frame is not None and not is_of_user(frame):
        frame = frame.f_back
    return UNKNOWN_LINE if frame is None else line_text(frame)


def is_of_user(frame: FrameType) -> bool:
    """Whether the running code is neither Lightning's, torch's, Hydra's nor this package's."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_USERS


def is_of_lightning(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is Lightning's or this package's."""
    return function.__module__.startswith(("lightning.", "lightning_pp."))
