"""Where in the user's code a torch function is called, so that two runs of a step can be compared call by call."""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from types import CodeType, FrameType

from lightning_pp.split._torch_private import running_autograd_function
from lightning_pp.split.record.reduction import Place, Site
from lightning_pp.split.record.source_lines import NOT_THE_USERS, package_folders

_METRICS, _TORCH = package_folders("torchmetrics"), package_folders("torch")


class Places:
    """Counts, in one run of a step, how often it reaches each site."""

    def __init__(self) -> None:
        self._occurrences: dict[Site, int] = {}

    def next(self, function: str) -> tuple[Place, FrameType] | None:
        """The running call and the user's frame that makes it.

        None where no correction belongs: within a metric, which looks after itself, and within the forward of a
        :class:`torch.autograd.Function`, whose backward was written for what it computes.
        """
        frame = _user_frame()
        if frame is None:
            return None
        site = Site(frame.f_code, _position(frame), function)
        occurrence = self._occurrences.get(site, 0)
        self._occurrences[site] = occurrence + 1
        return Place(site, occurrence), frame


def is_called_by_user() -> bool:
    """Whether the running function is called by the user's code, through torch and function modes at most."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(NOT_THE_USERS)


def _position(frame: FrameType) -> tuple[int | None, ...]:
    """Not ``f_lasti``: once the interpreter has specialised a call, another of its instructions makes it."""
    return _positions_of(frame.f_code)[frame.f_lasti // 2] if sys.version_info >= (3, 11) else (frame.f_lineno,)


@lru_cache(maxsize=4096)
def _positions_of(code: CodeType) -> list[tuple[int | None, ...]]:
    return list(code.co_positions())


def _user_frame() -> FrameType | None:
    if running_autograd_function():
        return None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(NOT_THE_USERS):
            return None if filename.startswith(_METRICS) else frame
        frame = frame.f_back
    return None
