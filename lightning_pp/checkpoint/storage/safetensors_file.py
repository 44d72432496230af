"""Safetensors files, read by the library of that name: https://github.com/huggingface/safetensors."""

from __future__ import annotations

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lightning_pp.checkpoint.storage.location import Location, is_file, on_disk
from lightning_pp.errors import CheckpointError

INDEX_FILENAME = "model.safetensors.index.json"


def map_safetensors(file: Location) -> dict[str, torch.Tensor]:
    """Map a file's tensors into memory, as the library does; only what is used is read.

    Raises:
        CheckpointError: The file is damaged or no such file.
    """
    try:
        with on_disk(file) as here:
            return load_file(here)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is damaged or not a safetensors file ({type(error).__name__}: {error}); use another one"
        ) from error


def map_folder(folder: Location) -> dict[str, torch.Tensor]:
    """Map the weights of a Hugging Face model directory: ``model.safetensors``, or the files that its index names.

    Raises:
        CheckpointError: There are none, or a file of the index is missing.
    """
    index = folder / INDEX_FILENAME
    if not is_file(index):
        single = folder / "model.safetensors"
        if not is_file(single):
            raise CheckpointError(f"{folder} has neither {single.name} nor {INDEX_FILENAME}")
        return map_safetensors(single)
    try:
        with on_disk(index) as here:
            places: dict[str, str] = json.loads(here.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error})") from error
    files = {name: map_safetensors(folder / name) for name in sorted(set(places.values()))}
    if missing := [name for name, file in places.items() if name not in files[file]]:
        raise CheckpointError(f"{index} has {missing[0]} in {places[missing[0]]}, which does not hold it")
    return {name: files[file][name] for name, file in places.items()}
