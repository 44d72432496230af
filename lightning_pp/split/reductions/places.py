"""Where in the user's code a torch function is called, so that two runs of a step can be compared call by call."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lightning_pp.split._torch_private import running_autograd_function
from lightning_pp.split.record.reduction import Place, Site
from lightning_pp.split.record.source_lines import NOT_THE_USERS, package_folders

_METRICS, _TORCH = package_folders("torchmetrics"), package_folders("torch")


class _Read(NamedTuple):
    """A number that Python has read.

    Attributes:
        offset: Of the instruction that reads it.
        label: Its position in the source, and how often the step has read it there.
    """

    offset: int
    label: tuple[Any, ...]


class Places:
    """Counts, in one run of a step, how often it reaches each site.

    A loop may go another way in each microbatch (``if chosen.any():``). So where Python has read a number before a call
    in the same round of a loop, or in the same run of a function, calls are counted anew from there, and named by how
    often that was read.
    """

    def __init__(self) -> None:
        self._occurrences: Counter[Any] = Counter()
        self._reads: dict[FrameType, _Read] = {}  # the last one of each function that runs

    def end(self) -> None:
        """The run is over: frames hold what the step has made."""
        self._reads.clear()

    def note_read(self, function: str) -> None:
        """The running call reads a number."""
        if is_called_by_user() and (frame := _user_frame()) is not None:
            site = Site(frame.f_code, _position(frame), function)
            self._occurrences[site] += 1
            self._reads = self._reads_of_callers(frame)
            self._reads[frame] = _Read(frame.f_lasti, (site.position, self._occurrences[site]))

    def next(self, function: str) -> tuple[Place, FrameType] | None:
        """The running call and the user's frame that makes it.

        None where no correction belongs: within a metric, which looks after itself, and within the forward of a
        :class:`torch.autograd.Function`, whose backward was written for what it computes.
        """
        frame = _user_frame()
        if frame is None:
            return None
        site = Site(frame.f_code, _position(frame), function)
        read = self._read_before(frame) if self._reads else ()
        self._occurrences[site, read] += 1
        return Place(site, (*read, self._occurrences[site, read])), frame

    def _read_before(self, frame: FrameType) -> tuple[Any, ...]:
        self._reads = self._reads_of_callers(frame)
        for caller, read in self._reads.items():
            if _is_in_loops_of_read(caller.f_code, read.offset, caller.f_lasti):
                return read.label
        return ()

    def _reads_of_callers(self, frame: FrameType | None) -> dict[FrameType, _Read]:
        """The reads of ``frame`` and of its callers; functions that have returned are left out."""
        found = dict[FrameType, _Read]()
        while frame is not None:
            if frame in self._reads:
                found[frame] = self._reads[frame]
            frame = frame.f_back
        return found


def _is_in_loops_of_read(code: CodeType, read: int, call: int) -> bool:
    """Whether a call is in each loop that a read is in; both are offsets of instructions."""
    return all(start <= call <= end for start, end in _loops_of(code) if start <= read <= end)


@lru_cache(maxsize=4096)
def _loops_of(code: CodeType) -> list[tuple[int, int]]:
    """The first and last instructions of loops."""
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        if "JUMP" in instruction.opname and instruction.argval < instruction.offset:
            ends[instruction.argval] = instruction.offset
    return list(ends.items())


def is_called_by_user() -> bool:
    """Whether the running function is called by the user's code, through torch and function modes at most."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith((*_TORCH, __file__))
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
