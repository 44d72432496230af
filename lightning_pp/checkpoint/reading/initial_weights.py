"""Weights to start from: of any checkpoint, of a safetensors file, of a Hugging Face model directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_pp.checkpoint.content import MODEL
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.reading.checks import check_model
from lightning_pp.checkpoint.reading.opened import load_state
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.reading.torch_file import read_file
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.location import Location, file_sizes, is_file, is_folder, is_remote
from lightning_pp.checkpoint.storage.safetensors_file import map_folder, map_safetensors
from lightning_pp.checkpoint.storage.torch_storage import NamingReader
from lightning_pp.errors import CheckpointError


def load_weights(path: str | os.PathLike[str], part: RankPart, *, strict: bool = True) -> None:
    """Load named tensors into this rank's part of the module; it reads what it owns. Collective over all ranks.

    The names may lack a prefix that all of the model's have, as those of a Hugging Face model inside a LightningModule
    do; tied parameters need one of their names.

    Args:
        path: A path or URL, of a ``.safetensors`` file, of a folder with ``model.safetensors`` or an index, of a
            sharded checkpoint, or of a file by ``torch.save`` with tensors by name or with such a ``state_dict``. The
            root's counts.
        part: What this rank holds; parameters and all buffers are overwritten in place, optimizers are left alone.
        strict: Whether names that are missing in the file or in the model are errors.

    Raises:
        CheckpointError: On all ranks: the weights are missing or damaged, or do not fit the model.
    """
    ranks = Ranks.from_mesh(part.mesh)
    path = from_root(str(path), ranks)
    with fail_together():
        location = folder.checkpoint_at(path)
        found, reader = _open(location, ranks.share)
        saved = _by_name_of_model(found, part.catalog)
        check_model(location, saved, part.catalog, part.destinations().keys(), strict)
    load_state(saved, part, reader)


def _open(path: Location, share: tuple[int, int]) -> tuple[Mapping[str, Any], NamingReader | None]:
    if is_folder(path):
        if folder.is_sharded_checkpoint(path):
            opened = FolderCheckpoint.open(path, None, check_files=True)
            return opened.content[MODEL], opened.reader
        if any(name.endswith(".safetensors") for name in file_sizes(path)):
            return map_folder(path), None
        folder.check_finished(path)
    if not is_file(path):
        if is_remote(path):
            raise CheckpointError(f"The weights to start from, {path}, do not exist; give the URL of a file or folder")
        raise CheckpointError(
            f"The weights to start from, {path}, do not exist (looked from {Path.cwd()}). They are read from this "
            "machine, so download a model of a hub first"
        )
    if path.suffix == ".safetensors":
        return map_safetensors(path), None
    content = read_file(path, None, mmap=True, share=share)
    found = content.get(MODEL, content) if isinstance(content, Mapping) else None
    if not isinstance(found, Mapping) or not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{path} holds no tensors by name; give a state_dict, a checkpoint or safetensors")
    return found, None


def _by_name_of_model(found: Mapping[str, Any], catalog: ParameterCatalog) -> dict[str, Any]:
    """Complete the names with the prefix under which most of them are the model's."""
    known = set(catalog.names)
    modules = {".".join(name.split(".")[:depth]) for name in known for depth in range(name.count(".") + 1)}
    candidates = ["", *(f"{module}." for module in sorted(modules, key=len) if module)]
    prefix = max(candidates, key=lambda prefix: sum(f"{prefix}{name}" in known for name in found))
    saved = {f"{prefix}{name}": value for name, value in found.items()}
    for alias, first in catalog.canonical.items():
        for missing, there in ((alias, first), (first, alias)):
            if missing not in saved and there in saved:
                saved[missing] = saved[there]
    return saved
