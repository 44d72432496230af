"""Checkpoints of both formats, and damage to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pipeline_parts import load_checkpoint, make_part, save_sharded
from pool import WorkerPool

from lightning_pp.checkpoint.reading.open import read_alone
from lightning_pp.errors import CheckpointError


def save(path: Path, single_file: bool) -> None:
    """Two stages, trained for one batch."""
    part = make_part((2, 1))
    part.train([0])
    if not single_file:
        save_sharded(path, part.held, {"epoch": 1})
        return
    whole = part.whole()
    if torch.distributed.get_rank() == 0:
        torch.save({**whole, "epoch": 1}, path)


def save_both(pool: WorkerPool, folder: Path) -> dict[bool, Path]:
    """A checkpoint in each format: whether it is a single file, and where it is."""
    paths = {single_file: folder / f"{single_file}.ckpt" for single_file in (False, True)}
    for single_file, path in paths.items():
        pool.run(save, path, single_file, process_group=True)
    return paths


def read(path: Path) -> dict[str, Any]:
    return read_alone(path, weights_only=False)


def load(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the error's text, or the whole state that was loaded."""
    part = make_part((2, 1))
    try:
        load_checkpoint(path, part.held)
    except CheckpointError as error:
        return str(error), {}
    return "", part.whole()


def flip(file: Path, position: int, bits: int = 0x10) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= bits
    file.write_bytes(content)


def position_of(file: Path, tensor: torch.Tensor) -> int:
    """Where the bytes of a tensor lie in a file."""
    position = file.read_bytes().find(tensor.detach().contiguous().numpy().tobytes())
    assert position > 0
    return position
