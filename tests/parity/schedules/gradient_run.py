"""Gradients of every batch of a short training, by a plain Trainer or by a pipeline with a given schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from parity_run import QUIET, tensor_difference
from small_models import VOCAB, Tower
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pp import PipelineParallelStrategy

Gradients = dict[str, Tensor]

LENGTH = 5


class Data(L.LightningDataModule):
    """Batches of ``batch_size`` samples of all replicas together, in order; the last one of an epoch is smaller."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        super().__init__()
        self.num_samples, self.batch_size = num_samples, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        tokens = torch.randint(VOCAB, (self.num_samples, LENGTH), generator=torch.Generator().manual_seed(5))
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        dataset = TensorDataset(tokens)
        sampler = DistributedSampler(dataset, shuffle=False, **placement)
        return DataLoader(dataset, batch_size=self.batch_size // placement["num_replicas"], sampler=sampler)


class GradientRecorder(L.Callback):
    """Copies every gradient before the optimizer uses it, and the program of every batch."""

    def __init__(self) -> None:
        self.steps: list[Gradients] = []
        self.programs: list[str] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        found = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            gradient = parameter.grad
            assert gradient is not None, f"{name} has no gradient"
            found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        self.steps.append(found)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if isinstance(trainer.strategy, PipelineParallelStrategy):
            step = trainer.strategy.engine.last_training_step
            assert step is not None
            self.programs.append(step[0].csv_text())


def record_gradients(
    strategy: PipelineParallelStrategy | None,
    devices: int,
    *,
    num_blocks: int,
    batch_size: int,
    num_batches: int,
    accumulate: int = 1,
    sums: bool = False,
) -> GradientRecorder:
    """Trains ``num_batches`` batches: of ``batch_size`` samples, and of about two thirds of it, in turn.

    With ``sums`` the model adds up what its blocks give outside of them.
    """
    recorder = GradientRecorder()
    torch.manual_seed(3)
    module = Tower(num_blocks, sums)
    trainer = L.Trainer(
        **QUIET,
        devices=devices,
        strategy=strategy or "auto",
        max_epochs=-(-num_batches // 2),
        limit_train_batches=2,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=[recorder],
    )
    trainer.fit(module, Data(batch_size + 2 * (batch_size // 3), batch_size))
    return recorder


def record_pipelined(
    schedules: Mapping[str, Mapping[str, Any]], pipeline: int, replicas: int, **run: Any
) -> dict[str, list[Gradients]]:
    """In a worker: the gradients of this rank's parameters, for each of some sets of strategy arguments."""
    found = {}
    for name, options in schedules.items():
        # without the check of first batches, which takes longer than they do
        strategy = PipelineParallelStrategy(pipeline, replicas, check_first_batches=False, **options)
        found[name] = record_gradients(strategy, pipeline * replicas, **run).steps
    return found


def largest_difference(ranks: list[list[Gradients]], expected: list[Gradients]) -> float:
    """Of any gradient on any rank in any step; together the ranks must have all."""
    assert {name for rank in ranks for name in rank[0]} == set(expected[0])
    largest = 0.0
    for rank in ranks:
        assert len(rank) == len(expected)
        for found, step in zip(rank, expected, strict=True):
            largest = max([largest, *(tensor_difference(found[name], step[name]) for name in found)])
    return largest
