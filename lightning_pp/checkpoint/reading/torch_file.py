"""Reading a file that ``torch.save`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_pp.errors import CheckpointError


def read_file(file: Path, weights_only: bool | None, mmap: bool = False) -> Any:
    """Load a file to the CPU.

    Args:
        file: Written by ``torch.save``.
        weights_only: As in ``torch.load``.
        mmap: Map the tensors into memory instead of reading them; only what is used is read then.

    Raises:
        CheckpointError: The file is missing, damaged, or holds what ``weights_only`` forbids; names the file.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist or is not a file; give the path of a checkpoint")
    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        if "Weights only load failed" in str(error):
            raise CheckpointError(
                f"{file} holds objects that weights_only=True does not allow; if you trust it, pass weights_only=False "
                f"({first_line})"
            ) from error
        raise CheckpointError(
            f"{file} is damaged or not a checkpoint ({file.stat().st_size} bytes), so use another one "
            f"({type(error).__name__}: {first_line})"
        ) from error
