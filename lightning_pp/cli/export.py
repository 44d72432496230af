"""``lightning-pp-export``: a checkpoint as safetensors, as a plain ``.ckpt``, or as a Hugging Face model directory."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.nn import Module

from lightning_pp.checkpoint import export as files
from lightning_pp.checkpoint.ownership.catalog import enumerate_names
from lightning_pp.checkpoint.reading.alone import open_alone
from lightning_pp.checkpoint.storage.folder import checkpoint_at
from lightning_pp.checkpoint.storage.location import Location, is_remote, is_url
from lightning_pp.conf.targets import build
from lightning_pp.errors import CheckpointError, ConfigurationError

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_EPILOG = """\
The format follows from TARGET: *.safetensors is one file, *.ckpt a file that Trainer() on one device resumes from,
anything else a folder: a model directory that transformers' from_pretrained loads, if the module is known and wraps a
transformers model (a run of `lightning-pp` keeps its config, so its checkpoints need no --module), or else the
safetensors files alone.

examples:
  lightning-pp-export outputs/.../last.ckpt model.safetensors
  lightning-pp-export outputs/.../last.ckpt gpt2/ --dtype bfloat16
  lightning-pp-export last.ckpt llama/ --module my_package.model:LitLlama
  lightning-pp-export last.ckpt plain.ckpt
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    options = _parser().parse_args(arguments)
    try:
        written = export(options)
    except (CheckpointError, ConfigurationError, OSError, ImportError) as error:
        message = str(error).replace("pass weights_only=False", "give --no-weights-only")
        sys.stderr.write(f"lightning-pp-export: {message}\n")
        sys.exit(1)
    sys.stdout.write(f"{written}\n")


def export(options: argparse.Namespace) -> str:
    """Do what the command line says; returns what was written, in words.

    Raises:
        CheckpointError: The source is no whole checkpoint, does not fit the module, or the target exists.
        ConfigurationError: The options contradict each other, or the module cannot be made.
    """
    source = checkpoint_at(options.source)
    if not is_remote(source) and not source.exists():
        raise CheckpointError(f"{source} does not exist (looked from {Path.cwd()})")
    if is_url(options.target):
        raise CheckpointError(f"{options.target} is a URL; give a target on this machine, and upload what is written")
    target = Path(options.target)
    kind = options.format or {".safetensors": "safetensors", ".ckpt": "ckpt"}.get(target.suffix, "folder")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    opened = open_alone(source, options.weights_only)
    if kind == "ckpt":
        if options.prefix:
            raise ConfigurationError("--prefix is for safetensors; a .ckpt keeps the names of the LightningModule")
        weights = files.Weights(opened, "", dtype)
        files.export_ckpt(opened, weights, target, with_optimizers=not options.model_only, overwrite=options.overwrite)
        return _told(weights, target)
    if kind == "safetensors":
        weights = files.Weights(opened, options.prefix or "", dtype)
        files.export_safetensors_file(weights, target, overwrite=options.overwrite)
        return _told(weights, target)
    module = _module(options.module, source, opened.content)
    wrapped = None if module is None else _wrapped_model(module)
    if wrapped is None and (kind == "hf" or options.module):
        reason = (
            "it is not known which: give --module package.module:Class"
            if module is None
            else (f"{type(module).__name__} holds none")
        )
        raise ConfigurationError(
            f"a Hugging Face model directory needs a module that wraps a transformers model; {reason}"
        )
    name, model = wrapped or ("", None)
    prefix = options.prefix if options.prefix is not None else f"{name}." if name else ""
    weights = files.Weights(opened, prefix, dtype)
    if model is not None:
        _check_names(weights, model, source)
    files.export_safetensors_folder(
        weights,
        target,
        max_shard_bytes=options.max_shard_size,
        overwrite=options.overwrite,
        also=lambda folder: None if model is None else _save_configuration(model, weights, folder),
    )
    return _told(weights, target) + ("" if model is None else f" ({type(model).__name__})")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-pp-export",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a sharded checkpoint folder, or a .ckpt file; a path or a URL (s3://...)")
    parser.add_argument("target", help="what to write on this machine; must not exist")
    parser.add_argument("--format", choices=("safetensors", "ckpt", "folder", "hf"), help="instead of TARGET's suffix")
    parser.add_argument("--module", metavar="PKG.MOD:CLASS", help="LightningModule of the checkpoint")
    parser.add_argument("--prefix", help="take the names that start with it, without it (default: found by --module)")
    parser.add_argument("--dtype", choices=_DTYPES, help="cast floating point weights (default: as they are)")
    parser.add_argument(
        "--max-shard-size", type=_bytes, default=_bytes("5GB"), metavar="SIZE", help="of a file in a folder (5GB)"
    )
    parser.add_argument("--model-only", action="store_true", help="a .ckpt without optimizer state")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET")
    parser.add_argument(
        "--no-weights-only",
        dest="weights_only",
        action="store_false",
        help="allow the checkpoint to hold objects of any class; it can run code then",
    )
    return parser


def _bytes(size: str) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{size!r} is no size; write 5GB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _told(weights: Any, target: Path) -> str:
    tied = f", {len(weights.tied)} further names of tied ones" if weights.tied else ""
    left_out = f", {len(weights.left_out)} entries left out ({weights.left_out[0]}, ...)" if weights.left_out else ""
    return f"{target}: {len(weights.names)} tensors{tied}{left_out}"


def _module(spec: str | None, source: Location, content: dict[str, Any]) -> Module | None:
    """The module on the meta device: named, or from the config that a run of ``lightning-pp`` left above ``source``."""
    with torch.device("meta"):
        if spec is not None:
            found = _class(spec)
            module = found(**_hyper_parameters(found, content))
        elif (config := _config_of_run(source)) is not None:
            module = build(config.model)
        else:
            return None
        if callable(configure := getattr(module, "configure_model", None)):
            configure()
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"{spec} makes a {type(module).__name__}, not a module")
    return module


def _class(spec: str) -> Any:
    package, colon, name = spec.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = import_module(package)
    except ImportError as error:
        raise ConfigurationError(f"--module {spec}: {error}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not colon or not hasattr(found, name):
        raise ConfigurationError(
            f"--module {spec}: give it as package.module:Class; {package} has no {name or 'class'}"
        )
    return getattr(found, name)


def _hyper_parameters(found: Any, content: dict[str, Any]) -> dict[str, Any]:
    """What ``save_hyperparameters`` kept, as far as the class takes it."""
    kept = {str(name): value for name, value in content.get("hyper_parameters", {}).items()}
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kept
    return {name: value for name, value in kept.items() if name in parameters}


def _config_of_run(source: Location) -> Any:
    if not isinstance(source, Path):
        return None  # the config lies beside the run, not beside the upload
    for folder in source.absolute().parents:
        file = folder / ".hydra" / "config.yaml"
        if file.is_file():
            config = OmegaConf.load(file)
            return config if "model" in config else None
    return None


def _wrapped_model(module: Module) -> tuple[str, Any] | None:
    """Name and module of the transformers model inside, outermost first."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None
    return next(((name, child) for name, child in module.named_modules() if isinstance(child, PreTrainedModel)), None)


def _check_names(weights: Any, model: Any, source: Location) -> None:
    expected = model.state_dict()
    there = {*weights.names, *weights.tied}
    missing = [name for name in expected if name not in there]
    unexpected = [name for name in there if name not in expected]
    specs = weights.specs()
    reshaped = [
        f"{name} ({specs[name][0]} in the checkpoint, {tuple(expected[name].shape)} in the model)"
        for name in specs
        if name in expected and specs[name][0] != tuple(expected[name].shape)
    ]
    problems = {"are missing": missing, "are unexpected": unexpected, "have another shape": reshaped}
    told = [f"{len(names)} names {what}: {enumerate_names(names)}" for what, names in problems.items() if names]
    if told:
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {'; '.join(told)}")


def _save_configuration(model: Any, weights: Any, folder: Path) -> None:
    config = model.config
    config.architectures = [type(model).__name__]
    floating = [dtype for _, dtype in weights.specs().values() if dtype.is_floating_point]
    if floating:
        config.dtype = max(set(floating), key=floating.count)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
