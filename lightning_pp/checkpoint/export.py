"""Exports a checkpoint to files for other programs: in one process, a tensor at a time."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_pp.checkpoint._torch_private import tree_flatten, tree_map_only
from lightning_pp.checkpoint.reading.open import optimizer_states
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor, in_memory
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.safetensors_file import INDEX_FILENAME, write_safetensors
from lightning_pp.errors import CheckpointError, enumerate_names


class Weights:
    """Tensors by the names under which they are written.

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
    def from_checkpoint(cls, opened: OpenedCheckpoint, prefix: str = "", dtype: torch.dtype | None = None) -> Weights:
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

    def written_dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is written in."""
        own = self.tensors[name]
        return self._dtype if self._dtype is not None and own.is_floating_point() else own.dtype

    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is written."""
        return {name: (tuple(tensor.shape), self.written_dtype(name)) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor, whole and cast."""
        return in_memory(self.tensors[name]).detach().to(self.written_dtype(name))


def export_safetensors_file(weights: Weights, target: Path, *, overwrite: bool = False) -> None:
    """Write one safetensors file; further names of tied parameters are noted in its header.

    Raises:
        CheckpointError: The target exists.
    """
    with _new(target, overwrite) as staged:
        write_safetensors(staged, weights.specs(), weights.read, {"format": "pt", **weights.tied})


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
        CheckpointError: The target exists.
    """
    specs = weights.specs()
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in specs.items()}
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
            metadata = {alias: first for alias, first in weights.tied.items() if first in names}
            own = {name: specs[name] for name in names}
            write_safetensors(staged / file, own, weights.read, {"format": "pt", **metadata})
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

    The file is laid out first, with room for the tensors; then they are copied into it one by one.

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
    tensors = {
        name: StoredTensor(name, shape, dtype, partial(weights.read, name))
        for name, (shape, dtype) in weights.specs().items()
    }
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
        _save_streaming(content, staged)


def _save_streaming(content: dict[str, Any], file: Path) -> None:
    """``torch.save`` of a nest with tensors that are read while they are written."""
    leaves, _ = tree_flatten(content)
    sources = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    room: dict[int, torch.Tensor] = {}
    for each in sources:  # not touched, so no memory is behind it
        room.setdefault(id(each), torch.empty(tuple(each.shape), dtype=each.dtype))
    layout = tree_map_only(torch.Tensor, lambda source: room[id(source)], content)
    with torch.serialization.skip_data():
        torch.save(layout, file)
    num_records = sum(bool(re.search(r"/data/\d+$", name)) for name in zipfile.ZipFile(file).namelist())
    if num_records != len(room):
        # an object that is no container has tensors inside, whose place is not known: this needs the memory
        everything = {id(source): in_memory(source) for source in sources}
        torch.save(tree_map_only(torch.Tensor, lambda source: everything[id(source)], content), file)
        return
    room.clear()
    del layout
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        written = torch.load(file, mmap=True, weights_only=False)
    targets = [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, torch.Tensor)]
    done: set[int] = set()
    for source, target in zip(sources, targets, strict=True):
        if id(source) not in done:
            done.add(id(source))
            target.copy_(in_memory(source))


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
