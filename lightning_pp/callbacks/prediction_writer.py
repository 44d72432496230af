"""Writes predictions to files, batch by batch, with the indices of their samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pp.errors import ConfigurationError


class PredictionWriter(BasePredictionWriter):
    """Writes the outputs of ``predict_step``, one file per batch; :func:`read_predictions` reads them.

    One rank of each replica writes. ``loader0/rank0/batch000000.pt`` is for the first loader, replica and batch. A file
    has ``{"indices": [...], "predictions": ...}`` with tensors on the CPU. It appears only when it is complete.

    Args:
        folder: Folder for the predictions, one file per batch.

    Raises:
        ConfigurationError: The folder already has predictions when predicting begins.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(write_interval="batch")
        self.folder = Path(folder)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses to mix predictions of two runs."""
        place = f"loader*/rank{_replica(trainer)}/batch*.pt"
        if stage == "predict" and _writes(trainer) and any(self.folder.glob(place)):
            raise ConfigurationError(f"{self.folder} holds predictions already; give another folder, or remove it")

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes one file."""
        if not _writes(trainer):
            return
        folder = self.folder / f"loader{dataloader_idx}" / f"rank{_replica(trainer)}"
        folder.mkdir(parents=True, exist_ok=True)
        host = apply_to_collection(prediction, torch.Tensor, lambda tensor: tensor.detach().cpu().clone())
        file = folder / f"batch{batch_idx:06d}.pt"
        staged = file.with_suffix(".partial")
        torch.save({"indices": None if batch_indices is None else list(batch_indices), "predictions": host}, staged)
        os.replace(staged, file)


def read_predictions(folder: str | Path, dataloader: int = 0) -> list[dict[str, Any]]:
    """Reads predictions of :class:`PredictionWriter` for one loader, in the order of its samples.

    Args:
        folder: The writer's folder.
        dataloader: The loader's number.

    Returns:
        For each batch ``{"indices": [...], "predictions": ...}``. ``indices`` are the samples' numbers, or None for a
        stream; ``predictions`` is the output of ``predict_step``.

    Raises:
        FileNotFoundError: The folder has no predictions of this loader.
    """
    files = sorted((Path(folder) / f"loader{dataloader}").glob("rank*/batch*.pt"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no predictions of loader {dataloader}")
    found = [torch.load(file, weights_only=True) for file in files]
    return sorted(found, key=lambda batch: (batch["indices"] or [0])[0])


def _replica(trainer: pl.Trainer) -> int:
    """The number of this rank's part of the data."""
    sampler: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0}
    return int(sampler["rank"])


def _writes(trainer: pl.Trainer) -> bool:
    """Whether this rank is the first of its replica."""
    return not any(getattr(trainer.strategy, f"{axis}_rank", 0) for axis in ("pipeline", "tensor_parallel"))
