"""A training that was stopped and started again continues as if it had not been: any layout, either kind of checkpoint.

Lightning itself resumes in the middle of an epoch only with a loader that can (``state_dict``), so most tests use one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from parity_run import (
    QUIET,
    Layout,
    Outcome,
    ParityData,
    Recorder,
    Settings,
    differences,
    list_difference,
    make_module,
    merged,
    reference,
    whole_weights,
)
from pool import WorkerPool
from torch.utils.data import DataLoader
from training_script import ResumableLoader

TOLERANCE = 1e-9
# 3 batches an epoch, the last one smaller; the optimizer, the scheduler and the groups all have state
SETTINGS = Settings("gpt2_float64_loss", optimizer="adamw", two_groups=True, scheduler=True, num_samples=22)
OF_ONE_SIZE = replace(SETTINGS, num_samples=24, only_trains=True)  # a step of each size is recorded by itself
SPLIT_CONVOLUTIONS = Settings("unet", clip_val=0.05, clip_algorithm="norm", scheduler=True, num_samples=22)
MIDDLE_OF_SECOND_EPOCH = 4
TWO_STAGES = Layout("zb_h1", 2, 1, 3)
TWO_BY_TWO = Layout("1f1b", 2, 2, 2)
THREE_STAGES = Layout("gpipe", 3, 1, 3)
TUNED = Layout("auto", 2, 1, 3)  # the schedule changes after the first epoch
TWO_REPLICAS = Layout("1f1b", 1, 2, 2)
ONE_DEVICE = None


class ResumableData(ParityData):
    def train_dataloader(self) -> DataLoader[Any]:
        loader = super().train_dataloader()
        return ResumableLoader(loader.dataset, batch_size=loader.batch_size, sampler=loader.sampler)


def part_of_training(
    layout: Layout | None,
    settings: Settings,
    *,
    start_from: Path | None = None,
    stop_after: int = -1,
    save_to: Path | None = None,
    single_file: bool = False,
    data: type[ParityData] = ResumableData,
    options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Trains from a checkpoint or the start, to a step or the end; on one device, or in a worker as a pipeline.

    A checkpoint at a step is written there, by a callback, since for Lightning an epoch is over once ``fit`` has ended.
    """
    recorder = Recorder()
    callbacks: list[L.Callback] = [recorder]
    if save_to is not None and stop_after > 0:
        callbacks.append(ModelCheckpoint(save_to.parent, save_to.stem, every_n_train_steps=stop_after))
    where: dict[str, Any] = {"devices": 1}
    if layout is not None:
        # the check of first batches has nothing to do with it, and takes longer than they do
        chosen = {"save_distributed_checkpoint": not single_file, "check_first_batches": False, **(options or {})}
        strategy = layout.strategy(**chosen)
        where = {"devices": layout.world_size, "strategy": strategy}
    trainer = L.Trainer(
        **{**QUIET, "enable_checkpointing": len(callbacks) > 1},
        **where,
        max_epochs=settings.max_epochs,
        max_steps=stop_after,
        limit_val_batches=0 if settings.only_trains else 1.0,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip_val,
        gradient_clip_algorithm=settings.clip_algorithm,
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    # plain Lightning restores before it converts the module, so a float32 module would round what it is given
    module = make_module(settings).double()
    if start_from is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()  # what the checkpoint does not restore is seen
    trainer.fit(module, data(settings), ckpt_path=start_from)
    if save_to is not None and stop_after < 0:
        trainer.save_checkpoint(save_to)
    recorder.outcome.weights = whole_weights(module)
    return recorder.outcome


def train_part(pool: WorkerPool, layout: Layout | None, settings: Settings, **kwargs: Any) -> Outcome:
    """:func:`part_of_training` in this process or in the workers."""
    if layout is None:
        return part_of_training(None, settings, **kwargs)
    outcomes = pool.run(part_of_training, layout, settings, world_size=layout.world_size, timeout=120, **kwargs)
    return merged(outcomes, layout)


def joined(*parts: Outcome) -> Outcome:
    """The parts of a training as one."""
    return Outcome(
        losses=[loss for part in parts for loss in part.losses],
        learning_rates=[rates for part in parts for rates in part.learning_rates],
        val_losses=[loss for part in parts for loss in part.val_losses],
        epoch_losses=parts[-1].epoch_losses,
        weights=parts[-1].weights,
    )


def assert_continues(parts: Outcome, whole: Outcome) -> None:
    """The parts make up the uninterrupted training, on one device."""
    # the mean over an epoch that was interrupted has a part of its batches only, in plain Lightning too
    parts.epoch_losses, whole.epoch_losses = [1.0], [1.0]
    found = differences(parts, whole)
    assert max(found.loss, found.val_loss, found.weight) < TOLERANCE, found


def uninterrupted(settings: Settings) -> Outcome:
    return joined(reference(settings))


@pytest.mark.parametrize(
    ("settings", "layout", "single_file"),
    [
        (SETTINGS, TWO_STAGES, False),
        # ``auto`` measures again after the restart, and begins with the schedule of estimated costs
        pytest.param(SETTINGS, TUNED, False, marks=pytest.mark.nightly),
        pytest.param(SPLIT_CONVOLUTIONS, THREE_STAGES, True, marks=pytest.mark.nightly),
        pytest.param(SETTINGS, TWO_BY_TWO, False, marks=pytest.mark.nightly),
        pytest.param(SETTINGS, TWO_STAGES, True, marks=pytest.mark.nightly),
        pytest.param(SETTINGS, TWO_BY_TWO, True, marks=pytest.mark.nightly),
        pytest.param(SPLIT_CONVOLUTIONS, THREE_STAGES, False, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value.model if isinstance(value, Settings) else str(value),
)
def test_stop_and_resume(
    pool: WorkerPool, tmp_path: Path, settings: Settings, layout: Layout, single_file: bool
) -> None:
    path = tmp_path / "stopped.ckpt"
    kind = {"single_file": single_file}
    first = train_part(pool, layout, settings, stop_after=MIDDLE_OF_SECOND_EPOCH, save_to=path, **kind)
    assert path.is_file() == single_file and len(first.losses) == MIDDLE_OF_SECOND_EPOCH
    second = train_part(pool, layout, settings, start_from=path, **kind)
    assert len(second.losses) == 2
    assert_continues(joined(first, second), uninterrupted(settings))


@pytest.mark.nightly
def test_resume_within_an_accumulating_run(pool: WorkerPool, tmp_path: Path) -> None:
    settings = Settings(
        "root_parameters", accumulate=2, clip_val=0.05, clip_algorithm="norm", num_samples=30, frozen=True
    )
    first = train_part(pool, TWO_BY_TWO, settings, stop_after=3, save_to=tmp_path / "stopped.ckpt")
    second = train_part(pool, TWO_BY_TWO, settings, start_from=tmp_path / "stopped.ckpt")
    assert (len(first.losses), len(second.losses)) == (6, 2)
    assert_continues(joined(first, second), uninterrupted(settings))


Chain = list[tuple[Layout | None, Mapping[str, Any]]]  # where it trains, and how (of part_of_training)
FILE, FOLDER = {"single_file": True}, {"single_file": False}
TWO_TENSOR_RANKS = Layout("1f1b", 1, 1, 2, tensor=2)
TENSOR_CHAINS: dict[str, Chain] = {
    "folder-file-one_device": [
        (TWO_TENSOR_RANKS, FOLDER),
        (Layout("zb_v", 2, 1, 2, tensor=2), FILE),
        (ONE_DEVICE, FILE),
    ],
    "replicas-file-one_device": [
        (Layout("1f1b", 1, 2, 2, tensor=2), FOLDER),
        (Layout("zb_v", 2, 1, 2, tensor=2), FILE),
        (ONE_DEVICE, FILE),
    ],
    "two_stages-two_tensor_ranks-two_stages": [(TWO_STAGES, FOLDER), (TWO_TENSOR_RANKS, FOLDER), (TWO_STAGES, FOLDER)],
}


@pytest.mark.parametrize(
    "chain", ["folder-file-one_device", *(pytest.param(c, marks=pytest.mark.nightly) for c in list(TENSOR_CHAINS)[1:])]
)
def test_tensor_size_changes_at_every_stop(pool: WorkerPool, tmp_path: Path, chain: str) -> None:
    check_chain(pool, tmp_path, TENSOR_CHAINS[chain], OF_ONE_SIZE)


@pytest.mark.parametrize(
    "chain",
    [
        [(TWO_TENSOR_RANKS, FILE), (ONE_DEVICE, FILE), (TWO_TENSOR_RANKS, FOLDER)],
        pytest.param(
            [(TWO_TENSOR_RANKS, FOLDER), (TWO_STAGES, FOLDER), (TWO_TENSOR_RANKS, FOLDER)], marks=pytest.mark.nightly
        ),
    ],
    ids=["files", "folders"],
)
def test_a_vocabulary_in_unequal_parts(pool: WorkerPool, tmp_path: Path, chain: Chain) -> None:
    check_chain(pool, tmp_path, chain, replace(OF_ONE_SIZE, model="odd_gpt2"))


def check_chain(
    pool: WorkerPool, tmp_path: Path, chain: Chain, settings: Settings = SETTINGS, stops: Sequence[int] = (2, 4, -1)
) -> None:
    """Stops after 2 and after 4 of 6 steps: in the middle of the first epoch and of the second."""
    parts, path = [], None
    for (layout, how), stop_after in zip(chain, stops, strict=True):
        target = tmp_path / f"{stop_after}.ckpt"
        parts.append(train_part(pool, layout, settings, start_from=path, stop_after=stop_after, save_to=target, **how))
        path = target
    assert [len(part.losses) for part in parts] == [b - a for a, b in pairwise((0, *stops[:-1], 6))]
    assert_continues(joined(*parts), uninterrupted(settings))


FULL_SHARD = {"options": {"sharding": "full_shard"}}
ELASTIC: Chain = [
    (Layout("zb_v", 2, 2, 2), FULL_SHARD),
    (Layout("zb_h1", 4, 1, 4), FOLDER),
    (Layout("1f1b", 1, 2, 2), FILE),
    (ONE_DEVICE, FILE),
    (Layout("zb_v", 2, 2, 2), FULL_SHARD),
]


@pytest.mark.nightly
def test_elastic(pool: WorkerPool, tmp_path: Path) -> None:
    """One training of six steps in five places: a V of shards, a longer pipeline, replicas, one device, and back."""
    check_chain(pool, tmp_path, ELASTIC, stops=(1, 2, 4, 5, -1))


def test_an_ordinary_loader_goes_on_within_an_epoch(pool: WorkerPool, tmp_path: Path) -> None:
    """Where plain Lightning would begin the data of the epoch again."""
    settings = Settings("residual_mlp", scheduler=True, num_samples=22)
    path = tmp_path / "stopped.ckpt"
    stopped = train_part(pool, TWO_STAGES, settings, stop_after=2, save_to=path, data=ParityData)
    resumed = train_part(pool, TWO_STAGES, settings, start_from=path, data=ParityData)
    assert_continues(joined(stopped, resumed), uninterrupted(settings))


def evaluated_from(layout: Layout | None, settings: Settings, path: Path) -> list[float]:
    """Validation loss of the weights in a checkpoint, by a trainer that has not trained."""
    where: dict[str, Any] = {"devices": 1}
    if layout is not None:
        where = {"devices": layout.world_size, "strategy": layout.strategy(check_first_batches=False)}
    trainer = L.Trainer(**QUIET, **where, precision="64-true", use_distributed_sampler=False)
    (metrics,) = trainer.validate(make_module(settings).double(), ParityData(settings), ckpt_path=path, verbose=False)
    return list(metrics.values())


@pytest.mark.parametrize(
    "single_file", [pytest.param(False, id="sharded", marks=pytest.mark.nightly), pytest.param(True, id="single_file")]
)
def test_validate_from_a_checkpoint(pool: WorkerPool, tmp_path: Path, single_file: bool) -> None:
    path, settings = tmp_path / "trained.ckpt", Settings("residual_mlp", optimizer="adamw", max_epochs=1)
    trained = train_part(pool, TWO_STAGES, settings, save_to=path, single_file=single_file)
    for layout in (THREE_STAGES, ONE_DEVICE if single_file else TWO_REPLICAS):
        if layout is None:
            results = [evaluated_from(None, settings, path)]
        else:
            results = pool.run(evaluated_from, layout, settings, path, world_size=layout.world_size)
        for found in results:
            assert list_difference(found, trained.val_losses[-1:]) < TOLERANCE
