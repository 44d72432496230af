"""Branches that the code after the last unit takes once Python has read a value that depends on weights."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from lightning_pp.split.record.source_lines import NOT_THE_USERS, package_folders, user_line
from lightning_pp.split.unit_calls.compilation import uncompiled_outside_units
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_METRICS = package_folders("torchmetrics")
_READ = (bool, int, float, complex, list)

Jump = tuple[int, int, int]
"""The ``id`` of a code object, the offset of an instruction in it (minus its line where reading began there), and
that of the one that followed."""


class Decisions:
    """Notes the branches that microbatches take: on one device the batch as a whole decides.

    From the first such read on, each instruction of the user's code is traced (``sys.settrace``): ``if loss > 2`` and
    ``if loss.item() > 2`` are alike. If a debugger or a measurement of coverage traces already, it stays in place, and
    nothing is noted.

    Args:
        lines: The lines that read such a value.

    Attributes:
        taken: By microbatch.
    """

    def __init__(self, lines: frozenset[str]) -> None:
        self._lines = lines
        self._codes: dict[int, CodeType] = {}
        self.taken: dict[int, frozenset[Jump]] = {}

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Around the step of a microbatch."""
        watch = _Watch(self._lines, self._codes)
        with uncompiled_outside_units(), watch:
            try:
                yield
            finally:
                watch.stop()
        self.taken[microbatch] = frozenset(watch.jumps)

    def lines_that_differ(self, other: Decisions) -> list[str]:
        """Lines of instructions that ``other`` has run as well, and after which it went on at another one."""
        mine, its = (frozenset[Jump]().union(*each.taken.values()) for each in (self, other))
        places = {jump[:2] for jump in mine}
        return sorted({self._line(*jump[:2]) for jump in its - mine if jump[:2] in places})

    def _line(self, code_id: int, offset: int) -> str:
        code = self._codes[code_id]
        line = -offset if offset < 0 else next(line for start, end, line in code.co_lines() if start <= offset < end)
        return f"{code.co_filename}:{line} in {code.co_name}"


class _Watch(OutsideUnits):
    """Follows the user's code once it has read a value at one of some lines."""

    def __init__(self, lines: frozenset[str], codes: dict[int, CodeType]) -> None:
        super().__init__()
        self._lines, self._codes = lines, codes
        self._frames: list[FrameType] = []
        self._packages: set[str] = set()
        self.jumps: set[Jump] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        result = func(*args, **(kwargs or {}))
        if type(result) in _READ and not (self._frames or running_unit()):
            line = user_line()
            if line in self._lines and not line.startswith(_METRICS):
                self._follow()
        return result

    def stop(self) -> None:
        """The step has ended."""
        if sys.gettrace() == self._begin:  # and not a debugger, by a breakpoint in the step
            sys.settrace(None)
            for frame in self._frames:
                frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = None, False, True
        self._frames.clear()

    def _follow(self) -> None:
        """Begins with the running frames, and continues with those that they call."""
        if sys.gettrace() is not None:
            return
        frame = inspect.currentframe()
        while frame is not None:
            if not frame.f_code.co_filename.startswith(NOT_THE_USERS):
                self._frames.append(frame)
                self._packages.add(_package_of(frame))
            frame = frame.f_back
        for each in self._frames:
            # not by its instruction: once the interpreter has specialised a call, another one makes it
            self._trace(each, -each.f_lineno)
        sys.settrace(self._begin)

    def _begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function is called; what units call is their own, and so is what libraries do."""
        file = frame.f_code.co_filename
        if running_unit() or file.startswith(NOT_THE_USERS):
            return None
        is_followed = not file.startswith(_INSTALLED) or _package_of(frame) in self._packages
        return self._trace(frame) if is_followed else None

    def _trace(self, frame: FrameType, before: int | None = None) -> Any:
        code_id, jumps = id(frame.f_code), self.jumps
        self._codes[code_id] = frame.f_code

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            if event == "opcode":
                if before is not None:
                    jumps.add((code_id, before, frame.f_lasti))
                before = frame.f_lasti
            return trace

        frame.f_trace_lines, frame.f_trace = False, trace
        frame.f_trace_opcodes = True  # Python 3.13 takes this in only where there is a function to tell
        return trace


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
