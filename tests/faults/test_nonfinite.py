"""Losses and gradients that are not finite: an error with the place, an update that all ranks skip, or nothing."""

from __future__ import annotations

import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity_run import QUIET
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.checkpoint.reading.open import read_alone

WIDTH, BATCH, NUM_BATCHES = 8, 4, 6
BAD = 3  # the number of the batch; the first two are run several times, to be checked
NUM_BLOCKS = 4


class Spike(torch.autograd.Function):
    """The identity; the gradient of one element is NaN."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        return vector.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[-1] = math.nan
        return gradient


class Block(nn.Module):
    """The gradient of ``shift`` goes nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, is_bad: bool) -> Tensor:
        return x + torch.tanh(self.linear(x)) + (Spike.apply(self.shift) if is_bad else self.shift)


class Module(pl.LightningModule):
    """Has the gradient of a block's ``shift`` go bad in batch ``BAD``; None for no block."""

    def __init__(self, bad_block: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.bad_block = bad_block
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for number, block in enumerate(self.blocks):
            x = block(x, number == self.bad_block and batch_idx == BAD)
        return nn.functional.mse_loss(x.sum(-1), y)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SkipsAlone(pl.Callback):
    """What ``on_nonfinite="skip"`` does, on one device."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in module.parameters()]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            for parameter in module.parameters():
                parameter.grad = None


def loader(num_replicas: int, bad_sample: int | None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * NUM_BATCHES, WIDTH, generator=generator)
    y = x.sum(-1).tanh()
    if bad_sample is not None:
        y[BATCH * BAD + bad_sample] = math.inf
    data = TensorDataset(x, y)
    if num_replicas == 1:
        return DataLoader(data, batch_size=BATCH)
    sampler = DistributedSampler(data, num_replicas, int(os.environ["RANK"]) % num_replicas, shuffle=False)
    return DataLoader(data, batch_size=BATCH // num_replicas, sampler=sampler)


def make_trainer(devices: int, strategy: Any, folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(**QUIET, devices=devices, strategy=strategy, default_root_dir=folder, max_epochs=1, **options)


def fit_pipeline(
    folder: Path,
    mode: str,
    *,
    replicas: int = 1,
    bad_block: int | None = None,
    bad_sample: int | None = None,
    options: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """In a worker: how the run ended, the losses, and what this rank, or after a whole run the module, has."""
    strategy = PipelineParallelStrategy(
        2, replicas, 2, on_nonfinite=mode, check_first_batches=False, **(settings or {})
    )
    trainer = make_trainer(2 * replicas, strategy, folder, **(options or {}))
    module = Module(bad_block)
    ended: tuple[str, str] | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(replicas, bad_sample))
            strategy.gather_module()
        except Exception as error:
            ended = type(error).__name__, str(error)
    told = [str(each.message) for each in caught if "skipped" in str(each.message)]
    weights = {name: value.detach() for name, value in module.named_parameters() if type(value) is nn.Parameter}
    return {"ended": ended, "losses": module.losses, "told": told, "weights": weights}


def fit_alone(
    folder: Path, bad_block: int | None, bad_sample: int | None, num_batches: int | None = None, **options: Any
) -> Module:
    trainer = make_trainer(1, "auto", folder, callbacks=[SkipsAlone()], limit_train_batches=num_batches, **options)
    module = Module(bad_block)
    trainer.fit(module, loader(1, bad_sample))
    return module


def check_losses(ranks: list[dict[str, Any]], replicas: int, expected: Module) -> None:
    """Each replica has the loss of its part of a batch; together they are those of one device."""
    for first in range(0, len(ranks), replicas):
        of_replicas = [outcome["losses"] for outcome in ranks[first : first + replicas]]
        means = [sum(each) / replicas for each in zip(*of_replicas, strict=True)]
        assert means == pytest.approx(expected.losses, rel=1e-5)


def check_weights(found: dict[str, Tensor], expected: Module) -> None:
    values = dict(expected.named_parameters())
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, values[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("replicas", "schedule"), [(1, "zb_h1"), (2, "1f1b")])
def test_a_loss_is_an_error_on_every_rank_before_the_update(
    pool: WorkerPool, tmp_path: Path, replicas: int, schedule: str
) -> None:
    """With replicas, the loss of one of them, in the second of the microbatches."""
    ranks = pool.run(
        fit_pipeline,
        tmp_path,
        "error",
        replicas=replicas,
        bad_sample=3,
        settings={"schedule": schedule},
        world_size=2 * replicas,
    )
    expected = fit_alone(tmp_path, None, None, BAD)
    check_losses(ranks, replicas, expected)
    last = 2 * replicas - 1
    for outcome in ranks:
        kind, text = outcome["ended"]
        assert kind == "NonFiniteError"
        assert text.startswith(
            f"The loss of microbatch 2 of 2 is inf, in batch {BAD} of epoch 0 (step {BAD}), on rank {last} (stage 1, "
            "the last). No update used it:"
        )
        if replicas == 1:
            check_weights(outcome["weights"], expected)


def test_a_loss_over_the_whole_batch_is_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    settings = {"whole_batch_loss": True}
    for outcome in pool.run(fit_pipeline, tmp_path, "error", bad_sample=0, settings=settings, world_size=2):
        kind, text = outcome["ended"]
        assert kind == "NonFiniteError" and text.startswith("The loss of the whole batch is inf, in batch 3")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("bad_block", [0, 3])
def test_a_gradient_is_an_error_before_the_update_where_it_is(pool: WorkerPool, tmp_path: Path, bad_block: int) -> None:
    """Without a collective the other rank knows of an error when it next needs the first."""
    ranks = pool.run(fit_pipeline, tmp_path, "error", bad_block=bad_block, world_size=2)
    rank = bad_block // 2
    kind, text = ranks[rank]["ended"]
    assert kind == "NonFiniteError"
    assert text.startswith(
        f"The gradient of blocks.{bad_block}.shift (unit blocks.{bad_block}, stage {rank}, rank {rank}) is not finite, "
        f"before the update of batch {BAD} of epoch 0 (step {BAD})."
    )
    check_weights(ranks[rank]["weights"], fit_alone(tmp_path, None, None, BAD))
    _, text = ranks[1 - rank]["ended"]
    assert "This rank ended because rank" in text


@pytest.mark.by_day(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_with_clipping_a_gradient_is_the_same_error_on_every_rank(
    pool: WorkerPool, tmp_path: Path, replicas: int
) -> None:
    ranks = pool.run(
        fit_pipeline,
        tmp_path,
        "error",
        replicas=replicas,
        bad_block=1,
        options={"gradient_clip_val": 0.5},
        world_size=2 * replicas,
    )
    for outcome in ranks:
        kind, text = outcome["ended"]
        assert kind == "NonFiniteError"
        assert re.match(r"The gradient of blocks.1.shift \(unit blocks.1, stage 0, rank \d\) is not finite", text)
    if replicas == 1:
        expected = fit_alone(tmp_path, None, None, BAD, gradient_clip_val=0.5)
        for outcome in ranks:
            check_weights(outcome["weights"], expected)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("replicas", "bad_block", "bad_sample", "options"),
    [
        (1, 1, None, {}),
        (1, None, 2, {"gradient_clip_val": 0.5}),
        (1, 3, None, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        (1, None, 1, {"accumulate_grad_batches": 2}),
        (2, 2, None, {}),
        (2, None, 3, {}),
    ],
)
def test_all_ranks_skip_the_update_as_one_device_would(
    pool: WorkerPool,
    tmp_path: Path,
    replicas: int,
    bad_block: int | None,
    bad_sample: int | None,
    options: dict[str, Any],
) -> None:
    ranks = pool.run(
        fit_pipeline,
        tmp_path,
        "skip",
        replicas=replicas,
        bad_block=bad_block,
        bad_sample=bad_sample,
        options=options,
        world_size=2 * replicas,
    )
    expected = fit_alone(tmp_path, bad_block, bad_sample, **options)
    check_losses(ranks, replicas, expected)
    for rank, outcome in enumerate(ranks):
        assert outcome["ended"] is None
        check_weights(outcome["weights"], expected)
        if rank == 0:
            (told,) = outcome["told"]
            what = "The loss of microbatch" if bad_block is None else f"The gradient of blocks.{bad_block}.shift "
            assert told.startswith(what) and told.endswith("skipped on all ranks, as 0 before it in this run.")


EARLY: dict[str, Any] = {"options": {"gradient_clip_val": 1e3}, "settings": {"post_validation": True}}


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_early_update_with_a_bad_gradient_is_undone_on_every_rank(
    pool: WorkerPool, tmp_path: Path, replicas: int
) -> None:
    options: dict[str, Any] = {**EARLY, "settings": {**EARLY["settings"], "sharding": "replicate"}}
    ranks = pool.run(
        fit_pipeline, tmp_path, "error", replicas=replicas, bad_block=1, world_size=2 * replicas, **options
    )
    expected = fit_alone(tmp_path, None, None, BAD)
    where = re.escape(f"batch {BAD} of epoch 0 (step {BAD}).")
    for outcome in ranks:  # a rank whose own gradients are finite may first hear that another has ended
        found = rf"(blocks.1.shift \(.*\) is not finite, before the update of|is nan, in) {where}"
        assert re.search(found, outcome["ended"][1])
        check_weights(outcome["weights"], expected)


def test_all_ranks_skip_an_early_update(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(fit_pipeline, tmp_path, "skip", bad_block=3, world_size=2, **EARLY)
    expected = fit_alone(tmp_path, 3, None)
    check_losses(ranks, 1, expected)
    for outcome in ranks:
        assert outcome["ended"] is None
        check_weights(outcome["weights"], expected)
    (told,) = ranks[0]["told"]
    assert told.startswith(f"The norm of all gradients is nan, in batch {BAD} of epoch 0 (step {BAD}). This update is")


def test_what_is_ignored_goes_on_as_on_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    for outcome in pool.run(fit_pipeline, tmp_path, "ignore", bad_block=0, world_size=2):
        assert outcome["ended"] is None
        assert [math.isfinite(loss) for loss in outcome["losses"]] == [True] * (BAD + 1) + [False] * 2


class Breaks(pl.Callback):
    """A weight becomes infinite after a good update."""

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        weight = module.blocks[3].shift  # type: ignore[union-attr, index]
        if trainer.global_step == 2 and type(weight) is nn.Parameter:
            weight.data[0] = math.inf


def save_bad_weights(folder: Path, sharded: bool, mode: str) -> tuple[str, str] | None:
    strategy = PipelineParallelStrategy(
        2, 1, 2, on_nonfinite=mode, save_distributed_checkpoint=sharded, check_first_batches=False
    )
    keeper = pl.callbacks.ModelCheckpoint(folder, "kept", every_n_train_steps=1, enable_version_counter=False)
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Breaks(), keeper],
        limit_train_batches=2,
    )
    try:
        trainer.fit(Module(), loader(1, None))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharded", [True, False])
def test_weights_that_are_not_finite_replace_no_checkpoint(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    for kind, text in pool.run(save_bad_weights, tmp_path, sharded, "error", world_size=2):
        assert kind == "CheckpointError"
        assert text.startswith("blocks.3.shift on rank 1 is not finite. Nothing is saved, so no good checkpoint is")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.ckpt"]
    state = read_alone(tmp_path / "kept.ckpt")["state_dict"]
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert pool.run(save_bad_weights, tmp_path, sharded, "ignore", world_size=2) == [None, None]


def fit_with_replicas_and_raise(folder: Path) -> None:
    trainer = make_trainer(4, PipelineParallelStrategy(2, 2, 2), folder)
    trainer.fit(Module(1), loader(2, None))


def test_a_gradient_in_one_shard_ends_the_ranks_of_all_replicas(pool: WorkerPool, tmp_path: Path) -> None:
    """Only the rank with the last shard of the vector finds it, and leaves; the others end when they need it."""
    report = pool.run(fit_with_replicas_and_raise, tmp_path, world_size=4, expect_failure=True, grace=20.0)
    kinds = [None if failure is None else failure.type for failure in report.failures]
    assert kinds.count("NonFiniteError") == 1 and None not in kinds, report.failures
    assert report.seconds < 100
