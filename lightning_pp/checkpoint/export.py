"""From a checkpoint to files that others read, in one process."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.ownership.catalog import enumerate_names
from lightning_pp.checkpoint.reading.alone import optimizer_states
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.safetensors_file import INDEX_FILENAME
from lightning_pp.errors import CheckpointError


class Weights:
    """Tensors under the names that they are to be written with.

    Args:
        tensors: By the names to write; what is stored is read when it is written.
        tied: For the further names of tied parameters, the name that is written.
        left_out: Names in the checkpoint that are not written.
        dtype: What floating point tensors are cast to; None leaves them.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        tied: Mapping[str, str] | None = None,
        left_out: Sequence[str] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.tensors = tensors
        self.tied = dict(tied or {})
        self.left_out = left_out
        self._dtype = dtype

    @classmethod
    def of_model(cls, opened: OpenedCheckpoint, prefix: str = "", dtype: torch.dtype | None = None) -> Weights:
        """The tensors of a checkpoint's model; of tied parameters the first name is written.

        Args:
            opened: The checkpoint.
            prefix: Only names that start with it are taken, without it.
            dtype: As above.

        Raises:
            CheckpointError: No name starts with the prefix.
        """
        state: Mapping[str, Any] = opened.content["state_dict"]
        tensors: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        left_out: list[str] = []
        places: dict[Any, str] = {}
        for name, value in state.items():
            if not name.startswith(prefix) or not isinstance(value, torch.Tensor):
                left_out.append(name)
                continue
            short = name.removeprefix(prefix)
            first = places.setdefault(_place(opened, value), short)
            if first == short:
                tensors[short] = value
            else:
                tied[short] = first
        if not tensors:
            raise CheckpointError(
                f"no tensor in {opened.path} has a name that starts with {prefix!r}; there are "
                f"{enumerate_names(list(state))}"
            )
        return cls(tensors, tied, left_out, dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor is written in."""
        own = self.tensors[name]
        return self._dtype if self._dtype is not None and own.is_floating_point() else own.dtype

    def read(self, name: str) -> torch.Tensor:
        """The tensor, whole and cast, with memory of its own."""
        own = self.tensors[name]
        tensor = own.read() if isinstance(own, StoredTensor) else own.detach().clone()
        return tensor.to(self.dtype_of(name)).contiguous()


def export_safetensors_file(weights: Weights, target: Path, *, overwrite: bool = False) -> None:
    """Write one safetensors file; further names of tied parameters are noted in its header.

    Raises:
        CheckpointError: The target exists, or the format cannot hold a tensor.
    """
    with _new(target, overwrite) as staged:
        _write_file(weights, list(weights.tensors), staged)


def _write_file(weights: Weights, names: Sequence[str], file: Path) -> None:
    """Some of the tensors, all of which are in memory then."""
    metadata = {"format": "pt"} | {alias: first for alias, first in weights.tied.items() if first in names}
    try:
        save_file({name: weights.read(name) for name in names}, file, metadata)
    except (KeyError, SafetensorError) as error:
        raise CheckpointError(f"safetensors files cannot hold these tensors ({error}); give --dtype") from error
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def export_safetensors_folder(
    weights: Weights,
    target: Path,
    *,
    stem: str = "model",
    max_shard_bytes: float = math.inf,
    overwrite: bool = False,
    also: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a folder as Hugging Face models have it: ``model.safetensors``, or shards and their index.

    Args:
        weights: What to write.
        target: The folder.
        stem: Of the files' names.
        max_shard_bytes: A file holds at most that, or one tensor.
        overwrite: Replace what is there.
        also: Writes more into the folder, such as the model's configuration.

    Raises:
        CheckpointError: The target exists, or the format cannot hold a tensor.
    """
    sizes = {name: own.numel() * weights.dtype_of(name).itemsize for name, own in weights.tensors.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    with _new(target, overwrite) as staged:
        staged.mkdir(parents=True)
        files = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        files = files if len(shards) > 1 else [f"{stem}.safetensors"]
        for file, names in zip(files, shards, strict=True):
            _write_file(weights, names, staged / file)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
            }
            (staged / INDEX_FILENAME).write_text(json.dumps(index, indent=2))
        also(staged)


def export_ckpt(
    opened: OpenedCheckpoint, weights: Weights, target: Path, *, with_optimizers: bool, overwrite: bool = False
) -> None:
    """Write the single file that a Trainer on one device resumes from.

    All tensors are in memory.

    Args:
        opened: The checkpoint.
        weights: Its weights.
        target: The file.
        with_optimizers: With their state; else weights, as with ``save_weights_only``.
        overwrite: Replace what is there.

    Raises:
        CheckpointError: The target exists.
    """
    content = {key: value for key, value in opened.content.items() if key != "optimizer_states"}
    tensors = {name: weights.read(name) for name in weights.tensors}
    content["state_dict"] = OrderedDict(
        (name, tensors[weights.tied.get(name, name)] if isinstance(value, torch.Tensor) else value)
        for name, value in opened.content["state_dict"].items()
    )
    if with_optimizers:
        content["optimizer_states"] = optimizer_states(opened)
    else:
        for key in ("lr_schedulers", "callbacks"):
            content.pop(key, None)
    with _new(target, overwrite) as staged:
        torch.save(tree_map_only(StoredTensor, lambda stored: stored.read(), content), staged)


def _place(opened: OpenedCheckpoint, value: torch.Tensor) -> Any:
    """Where the bytes of a tensor are, which tied parameters share."""
    if isinstance(value, StoredTensor):
        assert isinstance(opened, FolderCheckpoint)
        return opened.table.place(value.key)
    if not value.numel():
        return id(value)
    return value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride()


@contextmanager
def _new(target: Path, overwrite: bool) -> Iterator[Path]:
    """A path beside ``target`` that takes its place when the body is done.

    Raises:
        CheckpointError: The target exists.
    """
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(f"{target} exists; give another target, or --overwrite to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.staging_path(target)
    folder.remove(staged)
    try:
        yield staged
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        staged.replace(target)
    finally:
        folder.remove(staged)
