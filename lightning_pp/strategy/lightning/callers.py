"""Who asks: the user's code, or Lightning and this package."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl

_NOT_THE_USERS = ("lightning", "lightning_pp", "lightning_utilities", "torch", "contextlib", "hydra")
# in a dry run what the user asks of the trainer passes through here
_STANDS_FOR_TRAINERS = "lightning_pp.strategy.step.progress"


def line_of_user() -> str:
    """``file:line in function`` of the innermost caller that is the user's."""
    frames = _outwards(inspect.currentframe())
    return next((line_of(frame) for frame in frames if is_of_user(frame)), "an unknown line")


def user_reading(*properties: str) -> str | None:
    """The line of the user's that reads a property of its trainer, in the property of the strategy that this reads.

    None if the strategy is asked directly, or the trainer by Lightning itself or this package.

    Args:
        properties: Of the trainer, innermost first: the one that reads the strategy's, and those that read it in turn.
    """
    frames = islice(_outwards(inspect.currentframe()), 2, None)  # past this function and the strategy's property
    for name in properties:
        if getattr(next(frames, None), "f_code", None) is not _code_of(name):
            return None
    reader = next((frame for frame in frames if frame.f_globals.get("__name__") != _STANDS_FOR_TRAINERS), None)
    return None if reader is None or not is_of_user(reader) else line_of(reader)


@functools.cache
def _code_of(name: str) -> Any:
    return cast(Any, getattr(pl.Trainer, name)).fget.__code__


def namespaces_of_user() -> list[dict[str, Any]]:
    """The globals of all modules that are imported by now and may be the user's."""
    others = sys.stdlib_module_names.union(_NOT_THE_USERS)
    return [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in others and hasattr(module, "__dict__")
    ]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_of_user(frame: FrameType) -> bool:
    """Whether the running code is neither Lightning's, torch's, Hydra's nor this package's."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_USERS


def line_of(frame: FrameType, line: int | None = None) -> str:
    """``file:line in function``, with the running line if none is given."""
    return f"{frame.f_code.co_filename}:{line or frame.f_lineno} in {frame.f_code.co_name}"
