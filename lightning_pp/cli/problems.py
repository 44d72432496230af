"""Prints errors once and clearly: known mistakes without a traceback, everything else unchanged."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from lightning_pp.cli import launch
from lightning_pp.errors import (
    BatchError,
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
    ScheduleError,
    SplitError,
)

OWN_ERRORS: tuple[type[Exception], ...] = (
    *(BatchError, CheckpointError, ConfigurationError, NonFiniteError, ScheduleError, SplitError),
)
_GROUPS = ("trainer", "strategy", "schedule", "model", "optimizer", "data", "logger", "callbacks", "launcher", "recipe")
_RANK_ZERO_SPEAKS_FIRST_SECONDS = 10.0


class UserError(Exception):
    """A mistake that the user can correct; only the message is printed."""


@contextmanager
def user_errors(*also: type[Exception]) -> Iterator[None]:
    """Turn what a wrong option, file or model raises into :class:`UserError`.

    While things are built, a ValueError, TypeError or OSError comes from what the user asked for.
    ``HYDRA_FULL_ERROR=1`` shows where.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from lightning.fabric.utilities.exceptions import MisconfigurationException  # Lightning is slow to import

        cause: BaseException | None = error
        known: tuple[type[Exception], ...] = (*OWN_ERRORS, MisconfigurationException, OmegaConfBaseException, *also)
        if isinstance(error, InstantiationException):
            cause = error.__cause__
            known = (*OWN_ERRORS, MisconfigurationException, ValueError, TypeError, OSError, ImportError)
        if full_errors_wanted() or not isinstance(cause, known):
            raise
        raise UserError(str(cause)) from error


def full_errors_wanted() -> bool:
    """Whether ``HYDRA_FULL_ERROR`` asks for tracebacks."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


class HeldBack(io.StringIO):
    """Holds written text back until it is dropped or released; after that, text is written at once.

    Args:
        stream: Where it goes in the end.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self.is_let_go = False

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        return self._stream.write(text) if self.is_let_go else super().write(text)

    def flush(self) -> None:
        if self.is_let_go:
            self._stream.flush()

    def drop(self) -> None:
        """Forgets what was written, and holds nothing more back."""
        self.is_let_go = True

    def release(self) -> None:
        """Writes what is held; a rank other than 0 says that it is one."""
        text, self.is_let_go = self.getvalue(), True
        self._stream.write(text if launch.is_rank_zero() or not text else f"[rank {launch.global_rank()}] {text}")
        self._stream.flush()


@contextmanager
def held_back() -> Iterator[HeldBack]:
    """Holds back what goes to stderr while Hydra composes, so that what it refuses can be said in other words.

    What is held at the end of the block is written then: at once on rank 0, and a moment later on the others, which the
    launcher has ended by then if rank 0 has refused the same.
    """
    stderr = sys.stderr
    held = HeldBack(stderr)
    sys.stderr = held
    try:
        yield held
    except BaseException:
        if not held.is_let_go and not launch.is_rank_zero():
            time.sleep(_RANK_ZERO_SPEAKS_FIRST_SECONDS)
        raise
    finally:
        sys.stderr = stderr
        if not held.is_let_go:
            held.release()


def print_problem(error: UserError, command: str = "lightning-pp") -> None:
    """Print a user's mistake to stderr, once for the whole job.

    A rank other than 0 waits a moment: where all ranks fail alike, rank 0 says it first and the launcher ends the
    others; where only this one fails, it still speaks.
    """
    if launch.is_rank_zero():
        prefix = ""
    else:
        time.sleep(_RANK_ZERO_SPEAKS_FIRST_SECONDS)
        prefix = f"[rank {launch.global_rank()}] "
    sys.stderr.write(f"\n{prefix}{command}: {error}\n")
    sys.stderr.flush()


@contextmanager
def refused_by(command: str) -> Iterator[None]:
    """Prints what is wrong if the block raises :class:`UserError`, and ends the process with code 1."""
    try:
        yield
    except UserError as error:
        print_problem(error, command)
        sys.exit(1)


def check_choices(arguments: Sequence[str]) -> None:
    """Refuse what Hydra answers with a traceback of its own: ``trainer=1``, where an option of a group has a name.

    Args:
        arguments: Of the command line; what is not an override, or cannot be parsed, is left to Hydra.

    Raises:
        UserError: A group is set to a value that names no option.
    """
    for argument, override in readable(arguments):
        if override.key_or_group not in _GROUPS or override.is_sweep_override():
            continue
        value, deletes = override.value(), override.is_delete()
        are_names = isinstance(value, list) and all(isinstance(name, str) for name in value) and not deletes
        if are_names or isinstance(value, (str, dict)) or (value is None and deletes):
            continue
        raise UserError(
            f"{argument}: {override.key_or_group} is a group. Choose one of its options with "
            f"{override.key_or_group}=NAME (--help lists them), or set a field of it with "
            f"{override.key_or_group}.FIELD=VALUE"
        )


def readable(arguments: Sequence[str]) -> Iterator[tuple[str, Override]]:
    """The arguments that Hydra reads as overrides, each with what it reads."""
    parser = OverridesParser.create()
    for argument in arguments:
        with suppress(HydraException):
            yield argument, parser.parse_override(argument)


def dotted_keys(tree: object, prefix: str = "") -> list[str]:
    """Dotted names of everything in a tree of dicts, parents before children."""
    if not isinstance(tree, dict):
        return []
    return [key for name, node in tree.items() for key in (f"{prefix}{name}", *dotted_keys(node, f"{prefix}{name}."))]
