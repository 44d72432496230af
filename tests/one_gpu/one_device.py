"""Ranks that share one CUDA device over NCCL, or the CPUs over gloo; what they train is the doctor's.

Each rank is a host of its own, as ``lightning-pp-doctor --share-device`` makes them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pp.doctor.checks.trainings import (
    Batch,
    Chain,
    Notes,
    batches_for_replica,
    difference,
    loader,
    train_alone,
    trainer_for,
)
from lightning_pp.doctor.findings import Rank
from lightning_pp.doctor.sharing import limit_memory, variables_of_rank

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU_BY_NIGHT = pytest.param("cpu", marks=pytest.mark.nightly)
TIMEOUT_S = 240.0
"""Of a run: processes take turns on a device, and each message takes some milliseconds more."""
PATIENCE = timedelta(seconds=120)
"""Of the strategy: a rank may compile for longer than the doctor's trainings wait."""


def take_place(device_type: str) -> Rank:
    """In a worker: makes it one of the ranks that share a device."""
    number, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(variables_of_rank(number, num_ranks))
    device = torch.device("cpu")
    if device_type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        limit_memory(device, num_ranks)
    folder = Path(tempfile.gettempdir())
    return Rank(number, num_ranks, 1, device, is_quick=True, folder=folder, note=lambda text: None)


def placed(device_type: str, num_ranks: int) -> dict[str, Any]:
    """In a worker: where a Trainer is to put the ranks; on the first CUDA device if there is not one for each."""
    if device_type == "cpu" or torch.cuda.device_count() >= num_ranks:
        return {"accelerator": device_type, "devices": num_ranks}
    take_place(device_type)
    return {"accelerator": device_type, "devices": 1, "num_nodes": num_ranks}


def moved_apart(rank: Rank, module: Chain, plain: Chain, data: Sequence[Batch], **options: Any) -> tuple[float, str]:
    """Trains ``module`` as a pipeline, and ``plain`` by a loop on one device of the same kind.

    Args:
        rank: This one.
        module: Has parameters of the names and values of ``plain``.
        plain: As above; stays as it is.
        data: Batches of all replicas together.
        options: Of the strategy, and ``precision``.

    Returns:
        The largest difference of what a parameter of this rank has moved by, as a share of that, and its name.
    """
    replicas = options.get("data_parallel_size", 1)
    notes = Notes()
    layout = {"pipeline_parallel_size": rank.num_ranks // replicas, "timeout": PATIENCE}
    trainer = trainer_for(rank, callbacks=[notes], **{**layout, **options})
    trainer.fit(module, loader(batches_for_replica(data, rank.rank % replicas, replicas)))
    alone = type(plain)(len(plain.blocks))
    alone.load_state_dict(plain.state_dict())
    if options.get("precision") == "64-true":
        alone.double()
    expected = train_alone(alone, data, rank.device, bf16=False)
    return difference(notes, expected, plain)
