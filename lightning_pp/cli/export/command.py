"""``lightning-pp-export``: writes a checkpoint as safetensors, a plain ``.ckpt``, or a Hugging Face model directory."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_pp.checkpoint import export as files
from lightning_pp.checkpoint.reading.open import open_checkpoint
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.storage.folder import checkpoint_at
from lightning_pp.checkpoint.storage.location import Location, is_remote, is_url
from lightning_pp.cli.export.module import check_fit, module_of, wrapped_model
from lightning_pp.cli.export.peft_model import PeftCheckpoint
from lightning_pp.cli.problems import UserError
from lightning_pp.errors import CheckpointError, ConfigurationError
from lightning_pp.versions import parser_of

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_EPILOG = """\
TARGET chooses the format. *.safetensors is one file. *.ckpt is a file from which Trainer() on one device resumes.
Anything else is a folder. If the module is known and wraps a transformers model, the folder is a model directory for
from_pretrained; otherwise it has only the safetensors files. Checkpoints of `lightning-pp` need no --module, because a
run keeps its config. For a PEFT model the folder holds only the adapter, which PeftModel.from_pretrained loads, or with
--merge a whole model directory.

examples:
  lightning-pp-export outputs/.../last.ckpt model.safetensors
  lightning-pp-export outputs/.../last.ckpt gpt2/ --dtype bfloat16
  lightning-pp-export last.ckpt llama/ --module my_package.model:LitLlama
  lightning-pp-export outputs/.../last.ckpt adapter/
  lightning-pp-export outputs/.../last.ckpt llama_tuned/ --merge --dtype bfloat16
  lightning-pp-export last.ckpt plain.ckpt
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command."""
    options = _parser().parse_args(arguments)
    try:
        written = export(options)
    except (CheckpointError, ConfigurationError, UserError, OSError, ImportError) as error:
        message = str(error).replace("pass weights_only=False", "give --no-weights-only")
        sys.stderr.write(f"lightning-pp-export: {message}\n")
        sys.exit(1)
    sys.stdout.write(f"{written}\n")


def export(options: argparse.Namespace) -> str:
    """Do what the command line says; returns what was written, in words.

    Raises:
        CheckpointError: The source is not a whole checkpoint, does not fit the module, or the target exists.
        ConfigurationError: The options contradict each other, or the module cannot be made.
    """
    source = checkpoint_at(options.source)
    if not is_remote(source) and not source.exists():
        raise CheckpointError(f"{source} does not exist (looked from {Path.cwd()})")
    if is_url(options.target):
        raise CheckpointError(f"{options.target} is a URL. Give a target on this machine, and upload the result")
    target = Path(options.target)
    kind = options.format or {".safetensors": "safetensors", ".ckpt": "ckpt"}.get(target.suffix, "folder")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if kind == "ckpt" and options.merge:
        raise ConfigurationError("--merge is for a model directory or a .safetensors file: a .ckpt keeps its layers")
    opened = open_checkpoint(source, weights_only=options.weights_only)
    if kind == "ckpt":
        return _export_ckpt(opened, target, dtype, options)
    if kind == "safetensors" and not options.merge:
        weights = files.Weights.from_checkpoint(opened, options.prefix or "", dtype)
        files.export_safetensors_file(weights, target, overwrite=options.overwrite)
        return _line(weights, target)
    found = _model(opened, source, kind, options)
    if found is not None and getattr(found[1], "peft_config", None):
        return _export_peft(opened, source, target, found, kind, dtype, options)
    if options.merge or options.adapter:
        raise ConfigurationError("--merge and --adapter are for models of PEFT, but the checkpoint does not hold one")
    return _export_model(opened, source, target, found, dtype, options)


def _export_ckpt(opened: OpenedCheckpoint, target: Path, dtype: torch.dtype | None, options: argparse.Namespace) -> str:
    if options.prefix:
        raise ConfigurationError("--prefix is for safetensors: a .ckpt keeps the names of the LightningModule")
    weights = files.Weights.from_checkpoint(opened, "", dtype)
    files.export_ckpt(opened, weights, target, with_optimizers=not options.model_only, overwrite=options.overwrite)
    return _line(weights, target)


def _model(
    opened: OpenedCheckpoint, source: Location, kind: str, options: argparse.Namespace
) -> tuple[str, Any] | None:
    """Name and module of the transformers or PEFT model in the checkpoint; None if its module is not known."""
    module = module_of(options.module, source, opened.content)
    wrapped = None if module is None else wrapped_model(module)
    if wrapped is not None:
        return wrapped
    why = "the module is not known. Give --module package.module:Class"
    if module is not None:
        why = f"{type(module).__name__} does not wrap one"
    if options.merge:
        raise ConfigurationError(f"--merge needs a module that wraps a model of PEFT, but {why}")
    if kind == "hf" or options.module:
        raise ConfigurationError(
            f"a Hugging Face model directory needs a module that wraps a transformers model, but {why}"
        )
    if any(".base_layer." in name for name in opened.content["state_dict"]):  # as PEFT names layers that it wraps
        raise ConfigurationError(
            "the checkpoint holds a model of PEFT, whose names from_pretrained does not know. So the export needs a "
            f"module that wraps this model, but {why}. Or give a target FILE.safetensors to write the tensors under "
            "these names"
        )
    return None


def _export_model(
    opened: OpenedCheckpoint,
    source: Location,
    target: Path,
    found: tuple[str, Any] | None,
    dtype: torch.dtype | None,
    options: argparse.Namespace,
) -> str:
    """A model directory, or, if no model is known, its safetensors files alone."""
    name, model = found or ("", None)
    prefix = options.prefix if options.prefix is not None else f"{name}." if name else ""
    weights = files.Weights.from_checkpoint(opened, prefix, dtype)
    if model is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        shapes |= {alias: shapes[first] for alias, first in weights.tied.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        check_fit(shapes, expected, source, type(model).__name__)
    files.export_safetensors_folder(
        weights,
        target,
        max_shard_bytes=options.max_shard_size,
        overwrite=options.overwrite,
        also=lambda folder: None if model is None else _save_configuration(model, weights, folder),
    )
    return _line(weights, target) + ("" if model is None else f" ({type(model).__name__})")


def _export_peft(
    opened: OpenedCheckpoint,
    source: Location,
    target: Path,
    found: tuple[str, Any],
    kind: str,
    dtype: torch.dtype | None,
    options: argparse.Namespace,
) -> str:
    """An adapter alone, or the model that it makes of its base model."""
    name, model = found
    prefix = options.prefix if options.prefix is not None else f"{name}." if name else ""
    state = opened.content["state_dict"]
    tensors = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    checkpoint = PeftCheckpoint(model, tensors, source, options.adapter)
    if not options.merge:
        adapter = checkpoint.adapter_weights(dtype)
        files.export_safetensors_folder(
            adapter, target, stem="adapter_model", overwrite=options.overwrite, also=checkpoint.save_adapter_config
        )
        base = checkpoint.base_directory
        about = f"for the base model {base}" if base else "its base model has no name: give it to PEFT yourself"
        return f"{target}: adapter {checkpoint.adapter!r} of {len(adapter.tensors)} tensors, {about}"
    merged = checkpoint.merged_weights(dtype)
    if kind == "safetensors":
        files.export_safetensors_file(merged, target, overwrite=options.overwrite)
    else:
        files.export_safetensors_folder(
            merged,
            target,
            max_shard_bytes=options.max_shard_size,
            overwrite=options.overwrite,
            also=lambda folder: _save_configuration(checkpoint.base, merged, folder),
        )
    return f"{_line(merged, target)} ({type(checkpoint.base).__name__}, merged with adapter {checkpoint.adapter!r})"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("lightning-pp-export", __doc__, _EPILOG)
    parser.add_argument("source", help="a sharded checkpoint folder, or a .ckpt file; a path or a URL (s3://...)")
    parser.add_argument("target", help="file or folder to write on this machine; must not exist")
    parser.add_argument(
        "--format", choices=("safetensors", "ckpt", "folder", "hf"), help="format, instead of by TARGET"
    )
    parser.add_argument("--module", metavar="PKG.MOD:CLASS", help="LightningModule of the checkpoint")
    parser.add_argument("--prefix", help="keep only names with this prefix, and remove it (default: found by --module)")
    parser.add_argument("--merge", action="store_true", help="add a PEFT adapter to its base model")
    parser.add_argument("--adapter", metavar="NAME", help="adapter of a PEFT model (default: the only one)")
    parser.add_argument("--dtype", choices=_DTYPES, help="cast floating point weights (default: as they are)")
    parser.add_argument(
        "--max-shard-size", type=_bytes, default=_bytes("5GB"), metavar="SIZE", help="largest file in a folder (5GB)"
    )
    parser.add_argument("--model-only", action="store_true", help="write a .ckpt without optimizer state")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET")
    parser.add_argument(
        "--no-weights-only",
        dest="weights_only",
        action="store_false",
        help="allow objects of any class in the checkpoint; loading them can run code",
    )
    return parser


def _bytes(size: str) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{size!r} is not a size. Write 5GB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _line(weights: Any, target: Path) -> str:
    tied = f", {len(weights.tied)} further names of tied ones" if weights.tied else ""
    left_out = f", {len(weights.left_out)} entries left out ({weights.left_out[0]}, ...)" if weights.left_out else ""
    return f"{target}: {len(weights.tensors)} tensors{tied}{left_out}"


def _save_configuration(model: Any, weights: Any, folder: Path) -> None:
    config = model.config
    config.architectures = [type(model).__name__]
    floating = [dtype for dtype in map(weights.written_dtype, weights.tensors) if dtype.is_floating_point]
    if floating:
        config.dtype = max(set(floating), key=floating.count)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


if __name__ == "__main__":
    main()
