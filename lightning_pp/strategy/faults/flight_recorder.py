"""NCCL's flight recorder: the latest collectives and messages of each rank, written when one of them times out."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_pp.errors import ConfigurationError


def record_nccl(dirpath: str | Path | None, backend: str) -> None:
    """Has torch record what goes over NCCL; before process groups are made, which read the environment.

    A rank writes its file, ``rank_<number>``, when a collective times out. What the environment has already is kept.

    Args:
        dirpath: Folder of the files, on a file system of each host; None: nothing is recorded.
        backend: Of the process group.

    Raises:
        ConfigurationError: The backend is not NCCL, or the folder cannot be made.
    """
    if dirpath is None:
        return
    if "nccl" not in backend:
        raise ConfigurationError(
            f"flight_recorder_dirpath={str(dirpath)!r} records messages over NCCL, but this run communicates over "
            f"{backend}. Leave it out."
        )
    folder = Path(dirpath).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"flight_recorder_dirpath={str(dirpath)!r} cannot be made: {error}") from error
    for value, *names in (  # of now, and of earlier versions of torch, which it reads too
        ("2000", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        (f"{folder}/rank_", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
        ("1", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    ):
        if os.environ.keys().isdisjoint(names):
            os.environ[names[0]] = value
