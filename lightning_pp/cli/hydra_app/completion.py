"""Completion of the command line: a script for the shell, made once, that needs no Python when a key is pressed."""

from __future__ import annotations

import inspect
import pydoc
import shlex
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal, Union

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_pp.conf  # noqa: F401  (importing it registers the schema and the search path)
from lightning_pp.cli.hydra_app.refusals import choices
from lightning_pp.schedule import available_schedules

SHELLS = ("bash",)
_OPTIONS = ("--help", "--version", "--completion", "--cfg", "--config-dir", "--multirun", "--info")
# what no type says
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "strategy.schedule": (*available_schedules(), "auto"),
    "trainer.accelerator": ("cpu", "gpu", "auto"),
    "trainer.devices": ("auto",),
    "strategy.process_group_backend": ("nccl", "gloo"),
}
_FUNCTION = r"""# Completion of COMMAND for bash.
FUNCTION() {
  local line="${COMP_LINE:0:$COMP_POINT}" word name value values found rest
  word="${line##*[[:space:]]}"
  COMPREPLY=()
  case "$word" in
    -*)
      COMPREPLY=($(compgen -W "OPTIONS" -- "$word"))
      return
      ;;
    *=*)
      name="${word%%=*}"
      value="${word#*=}"
      case "${name#+}" in
VALUES
        *)
          COMPREPLY=($(compgen -f -- "$value"))
          return
          ;;
      esac
      found=($(compgen -W "$values" -- "$value"))
      # bash replaces what stands after the =, unless = is no break of words
      case "${COMP_WORDBREAKS}" in
        *=*) COMPREPLY=("${found[@]}") ;;
        *) COMPREPLY=("${found[@]/#/$name=}") ;;
      esac
      return
      ;;
  esac
  # names, one level at a time: strategy. before strategy.schedule=
  for name in $(compgen -W "NAMES" -- "$word"); do
    rest="${name#"$word"}"
    case "$rest" in
      *.*) name="$word${rest%%.*}." ;;
    esac
    case " ${COMPREPLY[*]} " in
      *" $name "*) ;;
      *) COMPREPLY+=("$name") ;;
    esac
  done
}
complete -o nospace -F FUNCTION COMMAND
"""


def completion_script(command: str, config_name: str) -> str:
    """A script that completes ``command``: groups, their options, names of values, and values that are words.

    Args:
        command: Its name.
        config_name: Its primary config, in ``lightning_pp.conf``.
    """
    groups, values = _table(config_name)
    for group, options in groups.items():
        values[group] = options
    cases = [
        f"        {name}) values={shlex.quote(' '.join(words))} ;;" for name, words in sorted(values.items()) if words
    ]
    script = _FUNCTION.replace("COMMAND", command).replace("FUNCTION", f"_{command.replace('-', '_')}")
    script = script.replace("OPTIONS", " ".join(_OPTIONS)).replace("VALUES", "\n".join(cases))
    return script.replace("NAMES", " ".join(f"{name}=" for name in sorted(values)))


def _table(config_name: str) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The groups with their options; and the values of every option of every group, with the words each may be."""
    groups: dict[str, tuple[str, ...]] = {}
    values: dict[str, tuple[str, ...]] = {}
    with initialize_config_module(config_module="lightning_pp.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for group in sorted(set(loader.list_groups("")) - {"hydra"}):
            groups[group] = tuple(choices(loader.get_group_options(group)))
        one_each = [f"{group}={option}" for group, options in groups.items() for option in options]
        for override in ["seed=0", *one_each]:
            try:
                config: Any = compose(config_name, [override])
                values |= dict(_words(OmegaConf.to_container(config, resolve=False)))
            except (HydraException, OmegaConfBaseException):
                continue  # an option that is not for this command
    return groups, values


def _words(node: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every value below ``node`` by its dotted name, with the words it may be, as far as known."""
    hints = _hints_of(node.get("_target_"))
    for name, value in node.items():
        place = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _words(value, f"{place}.")
            continue
        if name == "_target_":
            continue
        words = _KNOWN.get(place) or tuple(_literals(hints.get(name)))
        if isinstance(value, Enum):
            words = tuple(member.name for member in type(value))
        yield place, tuple(dict.fromkeys(words))


def _hints_of(target: Any) -> dict[str, Any]:
    """Types of the arguments of what a config builds; none where they cannot be known."""
    if not isinstance(target, str):
        return {}
    try:
        found: Any = pydoc.locate(target)
        return typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except Exception:  # importing what a config names may raise anything, and completion goes without it
        return {}


def _literals(hint: Any) -> Iterator[str]:
    origin = typing.get_origin(hint)
    if hint is bool:
        yield from ("true", "false")
    elif origin is Literal:
        yield from (str(value) for value in typing.get_args(hint) if isinstance(value, str))
    elif origin in (Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from _literals(each)
