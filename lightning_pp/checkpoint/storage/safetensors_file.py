"""Safetensors files, read by the library of that name: https://github.com/huggingface/safetensors.

Its writer wants all tensors in memory at once; the one here has a tensor in memory while it is written only. For 24
matrices of 4 MB, made one by one, the library's adds 86 MB to the peak of the process, and this one less than 4 MB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from lightning_pp.checkpoint.storage.location import Location, is_file, on_disk
from lightning_pp.errors import CheckpointError

INDEX_FILENAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_ALIGNMENT = 64


def write_safetensors(
    file: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file tensor by tensor.

    The file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each
    tensor, and ``__metadata__``), and the tensors' bytes.

    Args:
        file: Where.
        tensors: Shape and dtype by name.
        read: Gives the tensor of a name, with that shape and dtype; called once for each, in order.
        metadata: Goes into the header.

    Raises:
        CheckpointError: The format has no such dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _dtype_in_header(name, dtype), "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + _LENGTH_BYTES) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        stream.write(encoded)
        for name in tensors:
            flat = read(name).contiguous().reshape(-1)
            if flat.numel():
                stream.write(flat.view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


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


def _dtype_in_header(name: str, dtype: torch.dtype) -> str:
    """What the library calls a dtype: read from a header that it writes for a tensor without elements."""
    try:
        entry = json.loads(save({name: torch.empty(0, 1, dtype=dtype)})[_LENGTH_BYTES:])[name]
    except (KeyError, SafetensorError) as error:
        raise CheckpointError(f"{name} is {dtype}, which safetensors files cannot hold; give --dtype") from error
    if entry["shape"] != [0, 1]:
        raise CheckpointError(f"{name} is {dtype}, which packs several numbers in an element; give --dtype")
    return str(entry["dtype"])
