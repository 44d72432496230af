"""One training, by a plain Trainer on one device or by a pipeline in the worker pool, and the comparison of the two."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as L
import torch
from parity_models import MODELS, samples_of
from pool import WorkerPool
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pp import PipelineParallelStrategy


@dataclass(frozen=True)
class Settings:
    """What a training does, on however many devices.

    Attributes:
        model: Key of ``MODELS``.
        optimizer: As :class:`~parity_models.SettingsModule` takes it.
        two_groups: Two parameter groups with other learning rates.
        scheduler: A learning rate that changes at every step.
        frozen: The first half of the parameters is frozen.
        accumulate: Batches per optimizer step.
        clip_val: Passed on as ``gradient_clip_val``.
        clip_algorithm: ``"norm"`` or ``"value"``.
        num_samples: Training samples.
        batch_size: Samples in a batch, of all replicas together.
        num_val_samples: Validation samples.
        val_batch_size: As ``batch_size``.
        max_epochs: Epochs.
        precision: Lightning's name of the precision.
        only_trains: Neither validates nor checks first batches: together they take longer than the training.
    """

    model: str
    optimizer: str = "sgd"
    two_groups: bool = False
    scheduler: bool = False
    frozen: bool = False
    accumulate: int = 1
    clip_val: float | None = None
    clip_algorithm: str | None = None
    num_samples: int = 14
    batch_size: int = 8
    num_val_samples: int = 6
    val_batch_size: int = 4
    max_epochs: int = 2
    precision: str = "64-true"
    only_trains: bool = False


@dataclass(frozen=True)
class Layout:
    """How the pipeline is laid out.

    Attributes:
        schedule: Name of the schedule.
        pipeline: Ranks along the pipeline.
        replicas: Data-parallel size.
        num_microbatches: Slices of a replica's batch.
        num_profiled_batches: Batches that are measured before ``auto`` changes its schedule.
        tensor: Tensor-parallel size.
    """

    schedule: str = "1f1b"
    pipeline: int = 2
    replicas: int = 1
    num_microbatches: int = 3
    num_profiled_batches: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicas * self.tensor

    def strategy(self, **kwargs: Any) -> PipelineParallelStrategy:
        return PipelineParallelStrategy(
            pipeline_parallel_size=self.pipeline,
            data_parallel_size=self.replicas,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            num_profiled_batches=self.num_profiled_batches,
            tensor_parallel_size=self.tensor,
            **kwargs,
        )

    def __str__(self) -> str:
        of_tensor = f"x{self.tensor}" if self.tensor > 1 else ""
        return f"{self.schedule}-{self.pipeline}x{self.replicas}{of_tensor}-m{self.num_microbatches}"


@dataclass
class Outcome:
    """What a training left.

    Attributes:
        losses: What ``training_step`` returned, by batch.
        learning_rates: Of every group, by batch.
        val_losses: The logged validation loss, by validation.
        epoch_losses: The logged mean training loss, by epoch.
        weights: Parameters by all their names, whole.
        cut: Names of the parameters that were cut over tensor ranks.
        early: Updates that did not wait for a norm; how many of them were undone, or looked at between steps.
    """

    losses: list[float] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    early: tuple[int, int, int] = (0, 0, 0)


class Recorder(L.Callback):
    """Notes losses as they come."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outcome.losses.append(float(outputs["loss"]))
        groups = trainer.optimizers[0].param_groups
        self.outcome.learning_rates.append([group["lr"] for group in groups])

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if isinstance(strategy := trainer.strategy, PipelineParallelStrategy) and not strategy.is_plain:
            self.outcome.cut = set(strategy.engine.gradients.cut)
            validation = strategy.engine.post_validation
            self.outcome.early = validation.num_early, validation.num_made_again, validation.num_looked_at

    def on_validation_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.outcome.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.outcome.epoch_losses.append(float(trainer.callback_metrics["train_loss_epoch"]))


class ParityData(L.LightningDataModule):
    """Loaders that read in order; with replicas, batch k of all replicas together is batch k of one device."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def loader(self, num_samples: int, batch_size: int, seed: int) -> DataLoader[Any]:
        assert self.trainer is not None
        samples = samples_of(self.settings.model, num_samples, seed)
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(samples, shuffle=False, **placement)
        return DataLoader(samples, batch_size=batch_size // placement["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.settings.num_samples, self.settings.batch_size, 1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.settings.num_val_samples, self.settings.val_batch_size, 2)


def make_module(settings: Settings) -> L.LightningModule:
    """The module with the weights that every run starts from."""
    torch.manual_seed(11)
    return MODELS[settings.model](
        optimizer=settings.optimizer,
        two_groups=settings.two_groups,
        scheduler=settings.scheduler,
        frozen=settings.frozen,
    )


QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def whole_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """This rank's parameters under all their names, shards put together.

    After a training with tensor ranks the parameters of all ranks, since these hold parts.
    """
    trainer = getattr(module, "_trainer", None)
    strategy = None if trainer is None else trainer.strategy
    if isinstance(strategy, PipelineParallelStrategy) and strategy.sizes.tensor > 1:
        strategy.gather_module()
    weights = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = parameter.detach()
        weights[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()
    return weights


def train(settings: Settings, strategy: PipelineParallelStrategy | None = None, devices: int = 1) -> Outcome:
    """Trains with a plain Trainer, or with ``strategy``."""
    recorder = Recorder()
    trainer = L.Trainer(
        **QUIET,
        devices=devices,
        strategy=strategy or "auto",
        max_epochs=settings.max_epochs,
        limit_val_batches=0 if settings.only_trains else 1.0,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip_val,
        gradient_clip_algorithm=settings.clip_algorithm,
        precision=settings.precision,  # type: ignore[arg-type]
        use_distributed_sampler=False,
        callbacks=[recorder],
    )
    module = make_module(settings)
    trainer.fit(module, ParityData(settings))
    recorder.outcome.weights = whole_weights(module)
    return recorder.outcome


def train_pipelined(settings: Settings, layout: Layout, options: Mapping[str, Any] | None = None) -> Outcome:
    """In a worker: trains as a pipeline with ``options``; the outcome has this rank's parameters only."""
    chosen = {"check_first_batches": not settings.only_trains, **(options or {})}
    return train(settings, layout.strategy(**chosen), layout.world_size)


@functools.cache
def reference(settings: Settings) -> Outcome:
    """The training on one device without a pipeline, in this process, made once per session."""
    return train(settings)


def run_pipeline(pool: WorkerPool, settings: Settings, layout: Layout) -> Outcome:
    """The training as a pipeline, put together from all ranks."""
    return merged(pool.run(train_pipelined, settings, layout, world_size=layout.world_size, timeout=120), layout)


def merged(outcomes: list[Outcome], layout: Layout) -> Outcome:
    """One outcome from those of all ranks, which must agree."""
    first = outcomes[0]
    replicas = outcomes[: layout.replicas * layout.tensor : layout.tensor]
    for rank, outcome in enumerate(outcomes):
        replica = replicas[rank // layout.tensor % layout.replicas]
        assert outcome.losses == replica.losses, f"rank {rank} saw other losses than the rest of its pipeline"
        assert outcome.val_losses == first.val_losses, f"rank {rank} logged other validation losses"
        assert outcome.learning_rates == first.learning_rates, f"rank {rank} has other learning rates"
    of_replicas = [outcome.losses for outcome in replicas]
    losses = [sum(values) / len(values) for values in zip(*of_replicas, strict=True)]
    of_replicas = [outcome.epoch_losses for outcome in replicas]
    epoch_losses = [sum(values) / len(values) for values in zip(*of_replicas, strict=True)]
    weights: dict[str, Tensor] = {}
    for rank, outcome in enumerate(outcomes):
        for name, value in outcome.weights.items():
            torch.testing.assert_close(
                weights.setdefault(name, value), value, rtol=0, atol=0, msg=f"{name}, rank {rank}"
            )
    cut = set[str]().union(*(outcome.cut for outcome in outcomes))
    return replace(first, losses=losses, epoch_losses=epoch_losses, weights=weights, cut=cut)


@dataclass(frozen=True)
class Differences:
    """The largest relative differences between two outcomes; of a tensor, relative to its largest element."""

    loss: float
    val_loss: float
    epoch_loss: float
    weight: float
    worst_weight: str


def differences(outcome: Outcome, expected: Outcome) -> Differences:
    """Compares two trainings; what has to be equal exactly is asserted."""
    assert outcome.learning_rates == expected.learning_rates
    assert sorted(outcome.weights) == sorted(expected.weights), "a parameter is missing or has another name"
    errors = {name: tensor_difference(outcome.weights[name], value) for name, value in expected.weights.items()}
    worst = max(errors, key=lambda name: errors[name])
    return Differences(
        list_difference(outcome.losses, expected.losses),
        list_difference(outcome.val_losses, expected.val_losses) if expected.val_losses else 0.0,
        list_difference(outcome.epoch_losses, expected.epoch_losses),
        errors[worst],
        worst,
    )


def list_difference(values: list[float], expected: list[float]) -> float:
    """The largest relative difference of two equally long lists."""
    assert len(values) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def tensor_difference(value: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected element."""
    assert value.shape == expected.shape and value.dtype == expected.dtype
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def distance_moved(settings: Settings, outcome: Outcome) -> float:
    """How far the weights moved from where they started, as a share of their length."""
    start = whole_weights(make_module(settings).to(torch.float64))
    moved = sum(float((value.double() - start[name]).square().sum()) for name, value in outcome.weights.items())
    return (moved / sum(float(value.square().sum()) for value in start.values())) ** 0.5


def check_like_one_device(outcomes: list[Outcome], settings: Settings, layout: Layout) -> None:
    """Asserts that all ranks together trained as one device does, to 1e-9, and that it changed the weights."""
    outcome = merged(outcomes, layout)
    found = differences(outcome, reference(settings))
    assert max(found.loss, found.val_loss, found.epoch_loss, found.weight) < 1e-9, found
    assert distance_moved(settings, outcome) > 1e-3
