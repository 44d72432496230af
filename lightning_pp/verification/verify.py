"""``verify``: trains on one device and as a pipeline, and says what differs."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.verification.comparison import KINDS, TOLERANCES, Comparison, Difference, causes, tolerance_of
from lightning_pp.verification.processes import Failure, run
from lightning_pp.verification.recording import FLOAT64, Job


@dataclass
class Verification:
    """The result of :func:`verify`; ``print`` shows it as a table.

    Attributes:
        differences: Every value that differs from one device, in the order of the training.
        failure: The error of the strategy or of a run, if nothing could be compared; else empty.
        notes: What was changed for the comparison, such as dropout that was set to 0.
        causes: Known reasons why this module differs, if it does.
        compared: Number of values of each kind that were compared.
        largest: Largest relative difference of each kind.
    """

    differences: list[Difference] = field(default_factory=list)
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether the pipeline trains as one device does."""
        return not self.failure and not self.differences

    def __str__(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        if self.failure:
            return "\n".join([*notes, f"NOT COMPARED: {self.failure}"])
        rows = [f"{'':20} {'values':>8} {'different':>10}  largest relative difference"]
        for kind in KINDS:
            different = sum(difference.kind == kind for difference in self.differences)
            largest = f"{self.largest.get(kind, 0.0):.2g}"
            rows.append(f"{kind:20} {self.compared.get(kind, 0):8} {different:10}  {largest}")
        if self.equal:
            return "\n".join([*rows, *notes, "EQUAL: the pipeline trains as one device does."])
        first = [f"DIFFERENT, first in {self.differences[0]}"]
        return "\n".join([*rows, *notes, *first, *(f"  {cause}" for cause in self.causes)])


def verify(
    module: L.LightningModule | Callable[[], L.LightningModule],
    datamodule: L.LightningDataModule | Callable[[], L.LightningDataModule] | None,
    strategy: PipelineParallelStrategy | Callable[[], PipelineParallelStrategy],
    *,
    devices: int = 2,
    steps: int = 5,
    seed: int = 0,
    callbacks: Sequence[L.Callback] | Callable[[], Sequence[L.Callback]] = (),
    trainer: Mapping[str, Any] | None = None,
) -> Verification:
    """Trains a module with a plain ``Trainer()`` and as a pipeline of processes on the CPU, and compares the two.

    Both use the same seed and data, float64 where the module allows it, and no dropout. They train ``steps`` batches,
    validate two, save a checkpoint, and resume from it for ``steps`` more. Losses, logged values, gradients, weights,
    all buffers, optimizer states and learning rates are compared after each batch; states of callbacks and the weights
    and optimizer states in checkpoints at the end. In a script, call it under ``if __name__ == "__main__":``. Each
    batch writes twice the weights, gradients and optimizer states to a temporary folder: make a large model smaller.

    Args:
        module: The module, or a function or class that makes it, called in each process after seeding.
        datamodule: The same for the data; None if the module has its loaders.
        strategy: The same for the strategy, which must have one replica.
        devices: Number of processes of the pipeline.
        steps: Training batches before the checkpoint, and after it.
        seed: Seed of both trainings.
        callbacks: Your own callbacks. Checkpoint callbacks and those of this package are left out.
        trainer: Further arguments of the Trainer, such as ``accumulate_grad_batches``. Its ``precision`` is used if
            float64 fails on one device.

    Raises:
        ConfigurationError: ``devices`` or ``steps`` is too small, or an argument cannot be sent to the processes.
    """
    for name, value, least in (("devices", devices, 2), ("steps", steps, 1)):
        if value < least:
            raise ConfigurationError(f"{name}={value} must be {least} or more.")
    given = {"module": module, "datamodule": datamodule, "strategy": strategy, "callbacks": callbacks}
    with tempfile.TemporaryDirectory(prefix="lightning_pp_verify_") as folder:
        options = {**(trainer or {}), "precision": FLOAT64}
        job = Job(_pickled(given), steps, seed, options, 1, Path(folder, "plain"))
        return _verify(job, devices, (trainer or {}).get("precision", "32-true"))


def _verify(job: Job, devices: int, precision: Any) -> Verification:
    result = Verification()
    plain = run(job)
    if isinstance(plain, Failure):
        reason = f"{plain.kind}: {plain.message.partition(chr(10))[0]}"
        job = replace(job, trainer={**job.trainer, "precision": precision}, folder=job.folder.parent / "again")
        plain = run(job)
        if isinstance(plain, Failure):
            result.failure = f"the training fails on one device: {plain.kind}: {plain.message}"
            return result
        result.notes.append(f"precision={precision}, since float64 fails on one device: {reason}")
    facts = plain[0]
    if facts.num_without_dropout:
        result.notes.append(
            f"dropout is 0 in {facts.num_without_dropout} modules, since a pipeline draws other numbers"
        )
    tolerance = tolerance_of(facts.loss_dtype)
    if tolerance > TOLERANCES[torch.float64]:
        result.notes.append(f"the loss is {facts.loss_dtype}: relative differences up to {tolerance:g} count as equal")
    piped = replace(job, num_processes=devices, folder=job.folder.parent / "pipeline")
    ranks = run(piped)
    if isinstance(ranks, Failure):
        result.failure = f"the pipeline ends with {ranks.kind}: {ranks.message}"
        return result
    comparison = Comparison(job.folder, piped.folder, facts, ranks)
    result.differences, result.compared = comparison.differences, comparison.compared
    result.largest = comparison.largest
    if result.differences:
        result.causes = causes(facts, ranks[0], result.differences[0])
    elif not result.compared.get("loss"):
        result.failure = "the training on one device ran no batch"
    return result


def _pickled(given: Mapping[str, Any]) -> bytes:
    for name, part in given.items():
        try:
            pickle.dumps(part)
        except Exception as error:  # whatever pickling raises
            raise ConfigurationError(
                f"{name}={type(part).__name__} cannot be sent to the processes that verify() starts "
                f"({type(error).__name__}: {error}). Give a function at the top of a module that makes it: "
                f"verify(..., make_{name}, ...)."
            ) from error
    return pickle.dumps(tuple(given.values()))
