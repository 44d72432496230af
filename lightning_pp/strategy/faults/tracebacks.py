"""Prints an exception that ends a process: the frames on which its user can act, and no frames of libraries."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import NamedTuple

from lightning_pp.distributed.watch.this_rank import Stack
from lightning_pp.split.record.source_lines import line_text
from lightning_pp.strategy.lightning.callers import is_of_user

WHOLE_TRACEBACK = "LIGHTNING_PP_TRACEBACK"
"""Environment variable: 1 prints tracebacks whole."""

_MOST_LINES = 4
_SUMMARY = "_lightning_pp_told"
# where a main thread waits for other ranks, or for a device that does
_WAIT = (
    "torch.distributed.",
    "torch.cuda.",
    *(f"lightning_pp.{room}" for room in ("distributed.", "runtime.transport.", "sharding.", "strategy.results.")),
    "lightning_pp.strategy.batch.scaling",
)
_WORK = ("torch.distributed.checkpoint", "lightning_pp.distributed.fingerprints")


class _Summary(NamedTuple):
    sentence: str
    with_frames: bool


def user_frames(error: BaseException) -> tuple[str, ...]:
    """``file:line in function`` of the frames of ``error`` that are the user's, outermost first, at most four."""
    lines = [line_text(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_of_user(frame)]
    return tuple(lines[-_MOST_LINES:])


def tell_shortly(error: BaseException, sentence: str, *, with_frames: bool = False) -> None:
    """If no code catches ``error``, its process ends with ``sentence`` in place of the whole traceback.

    Nothing changes where other code prints exceptions (a notebook, a debugger), or if the environment variable
    ``LIGHTNING_PP_TRACEBACK`` is 1.

    Args:
        error: An exception on its way to the user.
        sentence: What is printed.
        with_frames: Whether the user's frames, and the exception's own message, follow.
    """
    if os.environ.get(WHOLE_TRACEBACK, "0") not in ("", "0"):
        return
    hook = sys.excepthook
    # torch.distributed has one that prints as Python does
    if hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch."):
        sys.excepthook = _print_shortly
    vars(error)[_SUMMARY] = _Summary(sentence, with_frames)


def main_thread_stack() -> Stack:
    """The main thread's stack: the user's last four lines, and the innermost line of any code."""
    frames: list[FrameType] = []
    # A finalizer would let the main thread leave frames whose objects are being made. Python 3.11 then writes into
    # memory that is used again. CPython switches collection off in sys._current_frames likewise (gh-106883).
    was_on = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    finally:
        gc.enable() if was_on else None
    names = (str(each.f_globals.get("__name__", "")) for each in frames)
    innermost = next((name for name in names if name.partition(".")[0] not in sys.stdlib_module_names), "")
    lines = [line_text(each) for each in frames if is_of_user(each)][:_MOST_LINES]
    if frames and not is_of_user(frames[0]):
        lines.insert(0, line_text(frames[0]))
    waits = innermost.startswith(_WAIT) and not innermost.startswith(_WORK)
    return Stack(waits, tuple(reversed(lines)), hash(tuple((id(each), each.f_lasti) for each in frames)))


def _print_shortly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    summary: _Summary | None = vars(error).get(_SUMMARY)
    if summary is None:
        sys.__excepthook__(kind, error, trace)
        return
    text = f"lightning_pp: {summary.sentence}\n"
    if summary.with_frames:
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        entries = zip(frames, traceback.extract_tb(trace), strict=True)
        text += "".join(traceback.format_list([entry for frame, entry in entries if is_of_user(frame)]))
        text += "".join(traceback.format_exception_only(kind, error))
        text += f"({WHOLE_TRACEBACK}=1 prints the whole traceback.)\n"
    sys.stderr.write(text)
    sys.stderr.flush()
