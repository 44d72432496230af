"""The module of a checkpoint, on the meta device, and the transformers model that it wraps."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torch.nn import Module

from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.cli.problems import UserError
from lightning_pp.conf.targets import build
from lightning_pp.errors import CheckpointError, ConfigurationError, enumerate_names
from lightning_pp.split.record.source_lines import innermost_user_line


def module_of(spec: str | None, source: Location, content: dict[str, Any]) -> Module | None:
    """The module: named, or from the config that a run of ``lightning-pp`` left above ``source``; None if unknown.

    Args:
        spec: ``package.module:Class``, or None.
        source: The checkpoint.
        content: What it holds; hyper-parameters in it are given to the class.

    Raises:
        UserError: The module cannot be found.
        ConfigurationError: It cannot be made.
    """
    with torch.device("meta"):
        if spec is not None:
            found = named(spec, "--module")
            module = found(**_hyper_parameters(found, content))
        elif (config := _run_config(source)) is not None:
            module = _built(config.model)
        else:
            return None
        if callable(configure := getattr(module, "configure_model", None)):
            configure()
    if not isinstance(module, Module):
        raise ConfigurationError(f"{spec} makes a {type(module).__name__}, not a module")
    return module


def _built(config: Any) -> Any:
    try:
        return build(config)
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ConfigurationError(f"the model of the run's config cannot be built: {cause}") from error


def named(target: str, option: str) -> Any:
    """What ``package.module:Name`` names; modules in the current folder are found.

    Raises:
        UserError: The module cannot be imported, or has no such name.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UserError(f"{option} {target} must be written as my_package.my_module:Name")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and module_name.startswith(error.name):
            where = f"it is neither installed nor in {Path.cwd()}"
        else:
            where = f"{type(error).__name__} at {innermost_user_line(error)}: {error}"
        raise UserError(f"{option} {target}: cannot import {module_name}: {where}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    for part in name.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(found).items() if isinstance(value, type) or callable(value)]
            raise UserError(f"{option} {target}: {module_name} has no {part}. It has {', '.join(names[:20])}")
        found = getattr(found, part)
    return found


def _hyper_parameters(found: Any, content: dict[str, Any]) -> dict[str, Any]:
    """What ``save_hyperparameters`` kept, as far as the class takes it."""
    kept = {str(name): value for name, value in content.get("hyper_parameters", {}).items()}
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kept
    return {name: value for name, value in kept.items() if name in parameters}


def _run_config(source: Location) -> Any:
    parents = source.absolute().parents if isinstance(source, Path) else ()  # an upload has no run's config beside it
    files = (folder / ".hydra" / "config.yaml" for folder in parents)
    config: Any = next((OmegaConf.load(file) for file in files if file.is_file()), {})
    return config if "model" in config else None


def wrapped_model(module: Module) -> tuple[str, Any] | None:
    """Name and module of the transformers model inside, or of the PEFT model around one, outermost first."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None
    kinds: tuple[type, ...] = (PreTrainedModel,)
    if "peft" in sys.modules:  # else nothing has made such a model
        from peft import PeftModel

        kinds += (PeftModel,)
    return next(((name, child) for name, child in module.named_modules() if isinstance(child, kinds)), None)


def check_fit(
    found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], source: Location, kind: str
) -> None:
    """Compare names and shapes in a checkpoint with those of a model.

    Args:
        found: The shape of each tensor in the checkpoint that is to be written; of tied ones, of each name.
        expected: The shape of each tensor that the model reads.
        source: The checkpoint.
        kind: The model's class, for the error.

    Raises:
        CheckpointError: They differ; all names are counted, and some are listed.
    """
    reshaped = [
        f"{name} ({shape} in the checkpoint, {expected[name]} in the model)"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    problems = {
        "are missing": [name for name in expected if name not in found],
        "are unexpected": [name for name in found if name not in expected],
        "have another shape": reshaped,
    }
    texts = [f"{len(names)} names {what}: {enumerate_names(names)}" for what, names in problems.items() if names]
    if texts:
        raise CheckpointError(f"{source} does not fit {kind}: {'; '.join(texts)}")
