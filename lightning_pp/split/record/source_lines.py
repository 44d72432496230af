"""Finds the responsible line of the user's code."""

from __future__ import annotations

import importlib.util
import inspect
import os
import traceback
from pathlib import Path
from types import FrameType

import torch


def package_folders(*packages: str) -> tuple[str, ...]:
    """Where the packages that are installed lie."""
    specs = [importlib.util.find_spec(package) for package in packages]
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec is not None and spec.origin)


_TORCH_FOLDER = os.path.dirname(torch.__file__)
_OWN_FOLDER = str(Path(__file__).parents[2])
UNKNOWN_LINE = "an unknown line"
SKIPPED = (_TORCH_FOLDER + os.sep, _OWN_FOLDER + os.sep, "<")
NOT_THE_USERS = (*SKIPPED, *package_folders("lightning", "lightning_utilities", "pytorch_lightning"))


def user_line() -> str:
    """``file:line in function`` of the innermost caller that belongs neither to torch nor to this package."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(SKIPPED) and not filename.endswith("/contextlib.py"):
            return line_text(frame)
        frame = frame.f_back
    return UNKNOWN_LINE


def line_text(frame: FrameType, line: int | None = None) -> str:
    """``file:line in function``, with the running line if none is given."""
    return f"{frame.f_code.co_filename}:{line or frame.f_lineno} in {frame.f_code.co_name}"


def innermost_user_line(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame of ``error`` that is neither torch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(SKIPPED)]
    return f"{outside[-1].filename}:{outside[-1].lineno} in {outside[-1].name}" if outside else UNKNOWN_LINE
