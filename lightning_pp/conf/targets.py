"""Builds the objects of a config, from allowed packages only, since a target can be any callable.

``model._target_=os.system`` is a valid config, and a config may lie beside a checkpoint that somebody sent. Hydra
refuses a list of dangerous callables by itself; here every target, at any depth, also has to come from an allowed
package. This is not a sandbox: what an allowed package can do, a config can ask of it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object
from hydra.utils import instantiate as build_with_hydra
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_pp.errors import ConfigurationError

#: Packages to allow besides :data:`ALLOWED_PACKAGES`, separated by commas or colons.
VARIABLE = "LIGHTNING_PP_ALLOWED_PACKAGES"
ALLOWED_PACKAGES = ("lightning", "lightning_pp", "pytorch_lightning", "torch", "torchmetrics", "transformers")

_ALLOWED_ALONE = frozenset({"datetime.timedelta", "pathlib.Path"})
_LOOK_UPS = frozenset(f"hydra.utils.get_{what}" for what in ("class", "method", "object", "static_method"))
# within the packages that are allowed by default: what unpickles, compiles, downloads or starts code
_NEVER = (
    *("torch.load", "torch.serialization", "torch.hub", "torch.package", "torch.classes", "torch.ops"),
    *("torch.jit.load", "torch.jit.CompilationUnit", "torch.utils.cpp_extension", "torch.utils.model_zoo"),
    *("torch.library", "torch.multiprocessing", "torch.distributed.run", "torch.distributed.launch"),
    *("torch.distributed.elastic", "torch.distributed.rpc", "torch.utils.collect_env"),
    *("lightning_pp.cli", "lightning.fabric.cli", "lightning.pytorch.cli", "lightning.app"),
    *("transformers.dynamic_module_utils", "transformers.cli"),
)
_ANOTHER_CLASS = (
    "Arguments of the class that _target_ named before are kept: remove one with ~data.NAME or ~model.NAME, or begin "
    "without arguments by data=own or recipe=own"
)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def build(config: Any, **arguments: Any) -> Any:
    """Build what ``config`` names, as ``hydra.utils.instantiate`` does with ``_convert_="all"``.

    Args:
        config: A part of a composed config, or a plain dict or list; None gives None.
        arguments: Passed to what is built, besides what the config has.

    Raises:
        ConfigurationError: A target, at any depth, is not from an allowed package, and nothing has been called; or it
            does not take an argument.
        InstantiationException: Something cannot be built; its cause says why.
    """
    check_targets(config)
    try:
        return build_with_hydra(config, _convert_="all", **arguments)
    except InstantiationException as error:
        if "unexpected keyword argument" in str(error.__cause__):
            raise ConfigurationError(f"{error.__cause__}. {_ANOTHER_CLASS}") from error
        raise


def check_targets_of_run(config: DictConfig) -> None:
    """:func:`check_targets` of everything that a run builds, before any of it is built."""
    for part in ("data", "callbacks", "strategy", "model", "logger", "trainer"):
        check_targets(config[part], f"{part}.")


def check_targets(config: Any, place: str = "") -> None:
    """Check every target of ``config`` without calling any; modules of allowed packages are imported.

    Args:
        config: As for :func:`build`.
        place: What the error puts before the name of a field: ``"model."``.

    Raises:
        ConfigurationError: A target is not from an allowed package, or cannot be found.
    """
    if config is None:
        return
    for field, target in _targets(_resolved(config), place):
        _check(field, target)


def allowed_packages() -> tuple[str, ...]:
    """Packages that targets may come from: those of this file, and those of :data:`VARIABLE`."""
    return (*ALLOWED_PACKAGES, *_added_packages())


def _added_packages() -> list[str]:
    return [name.strip() for name in re.split("[,:]", os.environ.get(VARIABLE, "")) if name.strip()]


def _resolved(node: Any) -> Any:
    """A config as plain dicts and lists. What cannot be resolved here is None: it cannot be built either."""
    if isinstance(node, DictConfig):
        return {name: _child(node, name) for name in node}
    if isinstance(node, ListConfig):
        return [_child(node, index) for index in range(len(node))]
    return node


def _child(node: DictConfig | ListConfig, name: Any) -> Any:
    try:
        return _resolved(node[name])
    except OmegaConfBaseException:
        return None


def _targets(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Each target in a tree, with the dotted place of it; for a look-up also what it looks up."""
    if isinstance(node, dict):
        if "_target_" in node:
            target = node["_target_"]
            yield f"{place}_target_", target
            if target in _LOOK_UPS:
                given = node.get("_args_") or []
                yield (f"{place}path", node["path"]) if "path" in node else (f"{place}_args_", [*given, None][0])
        for name, child in node.items():
            yield from _targets(child, f"{place}{name}.")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _targets(child, f"{place}{index}.")


def _check(place: str, target: Any) -> None:
    if target is None:
        raise ConfigurationError(
            f"{place} is not given: name the class or function to call, as in {place}=my_module.MyClass."
        )
    if not isinstance(target, str) or not _DOTTED.fullmatch(target):
        raise ConfigurationError(f"{place}={target!r} is not the dotted name of a class or function.")
    if target in _ALLOWED_ALONE or target in _LOOK_UPS:
        return
    package = target.partition(".")[0]
    if not _is_allowed(package):
        raise ConfigurationError(
            f"{place}={target} is refused: {package} is not an allowed package. A config may name code of "
            f"{', '.join(allowed_packages())} and of modules in the folder where the run starts. "
            f"If you trust {package}, set the environment variable {VARIABLE}={_with_added(package)}."
        )
    _check_found(place, target, _find(place, target))


def _with_added(package: str) -> str:
    return ",".join([*_added_packages(), package])


def _check_found(place: str, target: str, found: Any) -> None:
    """What a name of an allowed package leads to is itself of one: ``torch.os.system`` is not."""
    origin = _origin(found)
    if not _is_allowed(origin.partition(".")[0]):
        raise ConfigurationError(
            f"{place}={target} is refused: it belongs to {origin}, which is not an allowed package. Name it by the "
            "module that defines it. If you trust that module, set the environment variable "
            f"{VARIABLE}={_with_added(origin.partition('.')[0])}."
        )
    if target.partition(".")[0] not in ALLOWED_PACKAGES:
        return
    names = (target, f"{origin}.{getattr(found, '__qualname__', '')}")
    dangerous = any(name == never or name.startswith(f"{never}.") for name in names for never in _NEVER)
    if dangerous or any(part.startswith("_") for part in target.split(".")):
        raise ConfigurationError(
            f"{place}={target} is refused: it is private, or it may load or start any code. Call it in a function of "
            "your own, and name that function."
        )


def _find(place: str, target: str) -> Any:
    log = logging.getLogger("hydra.utils")
    disabled, log.disabled = log.disabled, True  # it would say the same in a line of its own
    try:
        return get_object(target)
    except Exception as error:
        raise ConfigurationError(f"{place}={target} cannot be found: {error}") from error
    finally:
        log.disabled = disabled


def _origin(found: Any) -> str:
    """The module that defines ``found``; that of its owner, for a method of a built-in class."""
    if isinstance(found, ModuleType):
        return found.__name__
    module = getattr(found, "__module__", None)
    if isinstance(module, str):
        return module
    owner = getattr(found, "__objclass__", None) or type(getattr(found, "__self__", found))
    return str(owner.__module__)


def _is_allowed(package: str) -> bool:
    return package in allowed_packages() or _is_of_this_run(package)


def _is_of_this_run(package: str) -> bool:
    """Whether ``package`` is what runs, or lies in the folder where the run starts or beside its script."""
    main: Any = sys.modules.get("__main__")
    running = (getattr(main, "__package__", None) or "").partition(".")[0]
    if package == "__main__" or (running and package == running):
        return True
    folders = {Path.cwd().resolve()}
    if getattr(main, "__file__", None):
        folders.add(Path(main.__file__).resolve().parent)
    # `python -m pdb train.py` is a script of Python's own, beside which all of Python lies
    folders -= {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(place.resolve().parent in folders for place in _places(package))


def _places(package: str) -> list[Path]:
    """The file of a top-level module, or the folders of a package; nothing is imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(place) for place in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []
