"""Safetensors files, written tensor by tensor and read by mapping: https://github.com/huggingface/safetensors.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor,
and ``__metadata__``, strings by string), and the tensors' bytes. The library of that name writes what is in memory;
here a tensor is in memory while it is written only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_pp.errors import CheckpointError

INDEX_FILENAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_ALIGNMENT = 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_safetensors(
    file: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file.

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
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which safetensors files cannot hold; give --dtype")
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
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


def map_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """Map a file's tensors into memory; only what is used is read.

    Raises:
        CheckpointError: The file is damaged or no such file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < length <= size - _LENGTH_BYTES:
                raise ValueError(f"its header would be {length} bytes of {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        content = torch.from_file(os.fspath(file), shared=False, size=size, dtype=torch.uint8)
        start = _LENGTH_BYTES + length
        return {name: _view(content, start, entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} is damaged or not a safetensors file ({type(error).__name__}: {error}); use another one"
        ) from error


def map_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Map the weights of a Hugging Face model directory: ``model.safetensors``, or the files that its index names.

    Raises:
        CheckpointError: There are none, or a file of the index is missing.
    """
    index = folder / INDEX_FILENAME
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{folder} has neither {single.name} nor {INDEX_FILENAME}")
        return map_safetensors(single)
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error})") from error
    files = {name: map_safetensors(folder / name) for name in sorted(set(places.values()))}
    if missing := [name for name, file in places.items() if name not in files[file]]:
        raise CheckpointError(f"{index} has {missing[0]} in {places[missing[0]]}, which does not hold it")
    return {name: files[file][name] for name, file in places.items()}


def _view(content: torch.Tensor, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, (begin, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
    shape = torch.Size(entry["shape"])
    if not 0 <= begin <= end <= len(content) - start or end - begin != shape.numel() * dtype.itemsize:
        raise ValueError(f"bytes {begin} to {end} of {len(content) - start} do not hold {tuple(shape)} of {dtype}")
    piece = content[start + begin : start + end]
    if (start + begin) % dtype.itemsize:  # written by a tool that does not align
        piece = piece.clone()
    return piece.view(dtype).reshape(shape)
