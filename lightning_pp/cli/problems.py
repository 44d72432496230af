"""What went wrong, told once and clearly: known mistakes without a traceback, everything else as it is."""

from __future__ import annotations

import difflib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_pp.cli import launch
from lightning_pp.cli._omegaconf_private import root_of
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
_GROUPS = ("trainer", "strategy", "schedule", "model", "optimizer", "data", "logger", "callbacks", "recipe")
_RANK_ZERO_SPEAKS_FIRST_SECONDS = 10.0


class UserError(Exception):
    """A mistake that the user can mend; the message is all there is to say."""


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
    except InstantiationException as error:
        cause = error.__cause__
        if full_errors_wanted() or cause is None:
            raise
        known = (*OWN_ERRORS, MisconfigurationException, ValueError, TypeError, OSError, ImportError)
        if isinstance(cause, known):
            raise UserError(f"{cause}") from error
        raise
    except OWN_ERRORS as error:
        if full_errors_wanted():
            raise
        raise UserError(str(error)) from error
    except OmegaConfBaseException as error:
        if full_errors_wanted():
            raise
        raise UserError(str(error)) from error
    except Exception as error:
        if full_errors_wanted() or not isinstance(error, (*also, MisconfigurationException)):
            raise
        raise UserError(str(error)) from error


def full_errors_wanted() -> bool:
    """Whether ``HYDRA_FULL_ERROR`` asks for tracebacks."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


@contextmanager
def rank_zero_first() -> Iterator[Callable[[], None]]:
    """Hold back on the other ranks what Hydra prints when it refuses a config: rank 0 refuses the same.

    Where only this rank refuses (its files differ), it still speaks, a moment later.

    Yields:
        A function that ends the holding back; called when the config is accepted.
    """
    if launch.is_rank_zero():
        yield lambda: None
        return
    stderr, held = sys.stderr, io.StringIO()
    sys.stderr = held

    def speak_freely() -> None:
        sys.stderr = stderr

    try:
        yield speak_freely
    finally:
        sys.stderr = stderr
        if held.getvalue():
            time.sleep(_RANK_ZERO_SPEAKS_FIRST_SECONDS)
            stderr.write(f"[rank {launch.global_rank()}] {held.getvalue()}")


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


def check_choices(arguments: Sequence[str]) -> None:
    """Refuse what Hydra answers with a traceback of its own: ``trainer=1``, where an option of a group has a name.

    Args:
        arguments: Of the command line; what is no override is left to Hydra, and so is what it cannot parse.

    Raises:
        UserError: A group is set to a value that names no option.
    """
    parser = OverridesParser.create()
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue
        if override.key_or_group not in _GROUPS or override.is_sweep_override():
            continue
        value = override.value()
        if isinstance(value, (str, dict)) or (value is None and override.is_delete()):
            continue
        if isinstance(value, list) and all(isinstance(name, str) for name in value) and not override.is_delete():
            continue
        raise UserError(
            f"{argument}: {override.key_or_group} is a group, and takes the name of one of its options "
            f"({override.key_or_group}=NAME; --help lists them). A field of it is set with "
            f"{override.key_or_group}.FIELD=VALUE"
        )


def explain_override(error: BaseException | None) -> None:
    """After Hydra's own message about an override that does not exist, print the closest names there are."""
    if not isinstance(error, ConfigCompositionException):
        return
    refused = error.__cause__
    if not isinstance(refused, (ConfigAttributeError, ConfigKeyError)) or not isinstance(
        refused.parent_node, DictConfig
    ):
        return
    parent = refused.parent_node
    section = str(refused.full_key).rpartition(".")[0]
    names = [str(name) for name in parent]
    close = difflib.get_close_matches(str(refused.key), names, n=3, cutoff=0.5)
    everything = OmegaConf.to_container(root_of(parent), resolve=False)
    elsewhere = [key for key in dotted_keys(everything) if key.rpartition(".")[2] == str(refused.key)]
    suggestions = list(dict.fromkeys([f"{section}.{name}".lstrip(".") for name in close] + elsewhere))
    if suggestions:
        sys.stderr.write(f"\nClosest names: {', '.join(suggestions)}\n")
    else:
        sys.stderr.write(f"\nNames in {section or 'the config'}: {', '.join(names)}\n")


def dotted_keys(tree: object, prefix: str = "") -> list[str]:
    """Dotted names of everything in a tree of dicts, parents before children."""
    if not isinstance(tree, dict):
        return []
    return [key for name, node in tree.items() for key in (f"{prefix}{name}", *dotted_keys(node, f"{prefix}{name}."))]
