"""Reading a file that ``torch.save`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_pp.checkpoint.storage.location import Location, is_file, on_disk
from lightning_pp.errors import CheckpointError


def read_file(file: Location, weights_only: bool | None, mmap: bool = False) -> Any:
    """Load a file to the CPU.

    Args:
        file: Written by ``torch.save``; a remote one is downloaded, and the download removed.
        weights_only: As in ``torch.load``.
        mmap: Map the tensors into memory instead of reading them; only what is used is read then.

    Raises:
        CheckpointError: The file is missing, damaged, or holds what ``weights_only`` forbids; names the file.
    """
    if not is_file(file):
        raise CheckpointError(f"{file} does not exist or is not a file; give the path of a checkpoint")
    with on_disk(file) as here:
        return _read(file, here, weights_only, mmap)


def _read(file: Location, here: Path, weights_only: bool | None, mmap: bool) -> Any:
    try:
        return torch.load(here, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        if "Weights only load failed" in str(error):
            raise CheckpointError(
                f"{file} holds objects that weights_only=True does not allow; if you trust it, pass weights_only=False "
                f"({first_line})"
            ) from error
        raise CheckpointError(
            f"{file} is damaged or not a checkpoint ({here.stat().st_size} bytes), so use another one "
            f"({type(error).__name__}: {first_line})"
        ) from error
