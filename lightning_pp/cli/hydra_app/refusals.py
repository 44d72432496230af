"""Refusals of Hydra, in one sentence with the closest names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_pp.cli._omegaconf_private import root_of
from lightning_pp.cli.problems import dotted_keys, readable

# options of Hydra's ConfigStore that others are made from
_SCHEMA = "_schema"
_MOST_NAMES = 40


def sentence_for(error: BaseException | None, arguments: Sequence[str]) -> str | None:
    """What is wrong with the command line, and what would fit.

    Args:
        error: What Hydra has raised.
        arguments: The command line.

    Returns:
        None for what is better told by Hydra: what is wrong in a file, and what this does not know.
    """
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, MissingConfigException):
        return _no_such_option(error, arguments)
    if not isinstance(error, ConfigCompositionException):
        return None
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        return _no_such_name(cause, cause.parent_node, arguments)
    text = str(error)
    if isinstance(cause, OmegaConfBaseException) and text.startswith("Error merging override "):
        return _no_such_value(text.splitlines()[0].removeprefix("Error merging override "), cause)
    chosen_twice = re.match(r"Multiple values for (?P<group>[\w/@.]+)\.", text)
    if chosen_twice is not None:
        return _chosen_already(chosen_twice["group"], arguments)
    not_chosen = re.match(r"Could not override '(?P<group>[\w/@.]+)'\.\s+No match in the defaults list", text)
    if not_chosen is not None:
        return _not_chosen(not_chosen["group"], arguments)
    return None


def choices(options: Iterable[str]) -> list[str]:
    """Of the options of a group those that are meant to be chosen: schemas are not."""
    return [option for option in options if not option.endswith(_SCHEMA)]


def _unreadable(error: OverrideParseException) -> str:
    given = error.override
    if "=" not in given and not given.startswith("~"):
        return f"{given} is not an override. Write NAME=VALUE, as in trainer.max_steps=100 (--help lists the names)"
    name, _, value = given.partition("=")
    remedy = f'{name}="[a, b]"' if value.startswith("[") else f"\"{name}='{value}'\""
    return (
        f"{given} cannot be read. Write a list as [a, b], and names with values as {{a: 1}}. Put a text with any of "
        f"=,:[]{{}} in quotes of its own. The shell takes one pair of quotes away: {remedy}"
    )


def _no_such_option(error: MissingConfigException, arguments: Sequence[str]) -> str | None:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    given = _override_of(group, arguments)
    options = choices(error.options or [])
    if given is None or not options:
        return None
    return f"{given}: {group} is one of {', '.join(options)}.{_closest(option, options)}"


def _no_such_name(refused: OmegaConfBaseException, parent: DictConfig, arguments: Sequence[str]) -> str:
    key, full_key = str(refused.key), str(refused.full_key)
    section = full_key.rpartition(".")[0]
    names = [str(name) for name in parent if name != "hydra"]
    everything = OmegaConf.to_container(root_of(parent), resolve=False)
    elsewhere = [name for name in dotted_keys(everything) if name.rpartition(".")[2] == key]
    close = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    suggestions = list(dict.fromkeys([f"{section}.{name}".lstrip(".") for name in close] + elsewhere))
    given = _override_of(full_key, arguments) or full_key
    what = f"{given}: {section or 'the config'} has no {key}."
    if suggestions:
        return f"{what} Closest names: {', '.join(suggestions)}"
    of_class = f". To give its class another argument, write +{given}" if "_target_" in names else ""
    return f"{what} Names in {section or 'the config'}: {', '.join(names[:_MOST_NAMES])}{of_class}"


def _no_such_value(given: str, refused: OmegaConfBaseException) -> str:
    name, _, value = given.partition("=")
    text = str(refused.msg or refused).splitlines()[0].rstrip(".")
    if "is not a ListConfig" in text:
        return f"{given}: {name} is a list. Write {name}='[{value}]'"
    if "is not a DictConfig" in text:
        return f"{given}: {name} holds names with values. Write {name}.NAME=VALUE, or {name}='{{NAME: VALUE}}'"
    return f"{given}: {text}"


def _chosen_already(group: str, arguments: Sequence[str]) -> str | None:
    given = _override_of(group, arguments)
    if given is None:
        return None
    return f"{given}: {group} is already chosen. To choose another, write {given.lstrip('+')}"


def _not_chosen(group: str, arguments: Sequence[str]) -> str | None:
    given = _override_of(group, arguments)
    if given is None or given.startswith("~"):
        return None
    return f"{given}: the defaults of the config choose no {group}, so there is none to replace. Add one by +{given}"


def _closest(name: str, names: Sequence[str]) -> str:
    """Of the names that are alike the one with the longest beginning in common: gpt3 is more of a gpt2_124m."""
    close = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=0.45)
    alike = [max(k for k in range(len(name) + 1) if one.startswith(name[:k])) for one in close]
    best = close[alike.index(max(alike))] if close else None
    return "" if best is None else f" The closest is {best}"


def _override_of(key: str, arguments: Sequence[str]) -> str | None:
    """The last argument that sets ``key``; None if none does."""
    found = [argument for argument, override in readable(arguments) if override.key_or_group == key]
    return found[-1] if found else None
