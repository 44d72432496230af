"""Reading a file that ``torch.save`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_pp.checkpoint.storage.checksums import check_archive, is_archive
from lightning_pp.checkpoint.storage.location import Location, is_file, on_disk
from lightning_pp.errors import CheckpointError


def read_file(file: Location, weights_only: bool | None, mmap: bool = False, share: tuple[int, int] = (0, 1)) -> Any:
    """Load a file to the CPU.

    Args:
        file: Written by ``torch.save``; a remote one is downloaded, and the download removed.
        weights_only: As in ``torch.load``.
        mmap: Map the tensors into memory instead of reading them; only what is used is read then.
        share: ``(index, number)`` of the processes that load the file: this one compares every ``number``-th tensor
            with its checksum, and all that is not a tensor.

    Raises:
        CheckpointError: The file is missing, damaged, or holds what ``weights_only`` forbids; names the file.
    """
    if not is_file(file):
        raise CheckpointError(f"{file} does not exist or is not a file; give the path of a checkpoint")
    with on_disk(file) as here:
        check_file(file, here, share)
        return _read(file, here, weights_only, mmap)


def check_file(file: Location, here: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Compare a file that ``torch.save`` wrote with its checksums; one in the format before torch 1.6 has none.

    Args:
        file: Its name in errors.
        here: The file, or a download of it.
        share: As in :func:`read_file`.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with here.open("rb") as stream:
            if is_archive(stream):
                check_archive(stream, share)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{file} is damaged or not a checkpoint ({here.stat().st_size} bytes), so use another one: {error}"
        ) from error


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
