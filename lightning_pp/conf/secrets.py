"""Removes secrets from the config that is saved and logged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

HIDDEN = "***"

_SECRET = re.compile(
    r"(.*_)?(password|passwd|passphrase|secret|secrets|credential|credentials|token|auth"
    r"|((api|access|account|auth|encryption|license|private|secret|signing|wandb)_?)key)",
    re.IGNORECASE,
)
_TEXT_TOKEN = re.compile(
    r"(.*_)?(bos|eos|pad|unk|sep|cls|mask|image|audio|video|start|end|special|prefix|suffix|middle)_token",
    re.IGNORECASE,
)
_OVERRIDE = re.compile(r"[+~]*([\w./@:-]+)=(.*)", re.DOTALL)
_SHORTEST_FOUND_ANYWHERE = 6


def is_secret(name: object) -> bool:
    """Whether a field of this (dotted) name holds a secret: ``api_key``, ``logger.hub_token``; not ``pad_token``."""
    last = str(name).rpartition(".")[2]
    return bool(_SECRET.fullmatch(last)) and not _TEXT_TOKEN.fullmatch(last)


def without_secrets(config: DictConfig) -> Any:
    """The resolved ``config`` as plain values to log: interpolations of the environment as written, secrets as ``***``.

    Raises:
        OmegaConfBaseException: An interpolation cannot be resolved.
    """
    resolved = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    written = OmegaConf.to_container(config, resolve=False)
    secrets = {*_secrets(resolved)}
    return hide(_with_environment_as_written(resolved, written, secrets), secrets)


def hide(tree: Any, secrets: set[str] | None = None) -> Any:
    """A copy of a tree of dicts and lists in which secrets are ``***``, also where they are a part of a string.

    Args:
        tree: Plain values. A string ``key=value`` is taken for an override.
        secrets: Values that are secret; by default those that ``tree`` has under a name of a secret.
    """
    values = {*_secrets(tree)} if secrets is None else secrets
    found_anywhere = sorted((v for v in values if len(v) >= _SHORTEST_FOUND_ANYWHERE), key=len, reverse=True)
    return _hidden(tree, found_anywhere)


def hide_in_files(folder: Path, names: tuple[str, ...]) -> None:
    """Rewrite the YAML files that Hydra has saved in ``folder``, if they hold a secret. Interpolations stay as written.

    Args:
        folder: Where they are.
        names: Of the files; those that are not there are left out.
    """
    files = [folder / name for name in names if (folder / name).is_file()]
    trees = {file: OmegaConf.to_container(OmegaConf.load(file), resolve=False) for file in files}
    secrets = {secret for tree in trees.values() for secret in _secrets(tree)}
    for file, tree in trees.items():
        hidden = hide(tree, secrets)
        if hidden != tree:
            OmegaConf.save(OmegaConf.create(hidden), file)


def _secrets(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if _is_value(value) and is_secret(name):
                yield value
            else:
                yield from _secrets(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _secrets(value)
    elif isinstance(tree, str) and (override := _OVERRIDE.fullmatch(tree)):
        value = override[2].strip("'\"")
        if is_secret(override[1]) and _is_value(value):
            yield value


def _is_value(value: Any) -> bool:
    """Whether ``value`` is a secret itself, and not where to find it."""
    return isinstance(value, str) and value not in ("", HIDDEN, "???", "null") and not value.startswith("${")


def _hidden(tree: Any, found_anywhere: list[str]) -> Any:
    if isinstance(tree, Mapping):
        return {
            name: HIDDEN if _is_value(value) and is_secret(name) else _hidden(value, found_anywhere)
            for name, value in tree.items()
        }
    if type(tree) in (list, tuple):
        return type(tree)(_hidden(value, found_anywhere) for value in tree)
    if not isinstance(tree, str):
        return tree
    override = _OVERRIDE.fullmatch(tree)
    if override and is_secret(override[1]) and _is_value(override[2].strip("'\"")):
        return f"{tree[: override.start(2)]}{HIDDEN}"
    for secret in found_anywhere:
        tree = tree.replace(secret, HIDDEN)
    return tree


def _with_environment_as_written(resolved: Any, written: Any, secrets: set[str]) -> Any:
    """``resolved``, with what reads the environment as in ``written``; values of secrets are added to ``secrets``."""
    if isinstance(written, str) and "${oc.env:" in written:
        if isinstance(resolved, str) and re.search(r"KEY|TOKEN|SECRET|PASS", written):
            secrets.add(resolved)
        return written
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {
            name: _with_environment_as_written(value, written.get(name), secrets) for name, value in resolved.items()
        }
    if isinstance(resolved, list) and isinstance(written, list):
        return [_with_environment_as_written(value, raw, secrets) for value, raw in zip(resolved, written, strict=True)]
    return resolved
