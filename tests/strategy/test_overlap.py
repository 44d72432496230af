"""Consecutive steps overlap: a rank that is done with its part goes on, and what makes ranks wait is counted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from lightning_pp import PipelineParallelStrategy

NUM_BATCHES = 8
LOG_EVERY = 4


def strategy(replicas: int = 1, **options: Any) -> PipelineParallelStrategy:
    # what is counted here is a step like all others: the check of the first batches has gathers of its own
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": replicas, "num_microbatches": 2}
    settings["check_first_batches"] = False
    return PipelineParallelStrategy(**{**settings, **options})


def data(replicas: int = 1) -> Any:
    return loader(num_samples=4 * NUM_BATCHES * replicas, batch_size=4)


class Logs(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


# ---------------------------------------------------------------- which collectives a step has

NO_COLLECTIVES = {"send", "recv", "recv_anysource"}
COLLECTIVES = {
    name
    for name in vars(dist.ProcessGroup)
    if not name.startswith("__")
    and any(word in name for word in ("gather", "reduce", "scatter", "all_to_all", "alltoall", "broadcast", "barrier"))
}
Call = tuple[str, tuple[int, ...]]


class Counts(pl.Callback):
    """Counts what is asked of process groups, by name and ranks, while they do it."""

    def __init__(self) -> None:
        self.steps: list[Counter[Call]] = []
        self.aside: Counter[Call] = Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append(Counter())

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        # as they lie in the class: looked up through it they would not be methods any more
        methods = {name: vars(dist.ProcessGroup)[name] for name in COLLECTIVES | NO_COLLECTIVES}
        for name in methods:
            setattr(dist.ProcessGroup, name, self._counted(name, getattr(dist.ProcessGroup, name)))
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(dist.ProcessGroup, name, method)

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def count(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = (name, tuple(dist.get_process_group_ranks(group)))
            if threading.current_thread() is not threading.main_thread():
                self.aside[call] += 1
            elif self.steps:
                self.steps[-1][call] += 1
            return method(group, *args, **kwargs)

        return count


def counted_fit(replicas: int, options: dict[str, Any]) -> tuple[list[dict[Call, int]], dict[Call, int]]:
    counts = Counts()
    run = trainer(2 * replicas, strategy(replicas), callbacks=[counts], log_every_n_steps=LOG_EVERY, **options)
    with counts.counting():
        run.fit(Logs(), data(replicas))
    assert len(counts.steps) == NUM_BATCHES
    collectives = [{call: n for call, n in step.items() if call[0] in COLLECTIVES} for step in counts.steps[:-1]]
    return collectives, dict(counts.aside)


def check_counts(
    ranks: list[Any], replicas: int, *, in_step: Callable[[int, int], dict[Call, int]], steps_at: Callable[[int], bool]
) -> None:
    """``in_step(rank, batch)`` says what a step has besides the replicas' own traffic in the rank's stage."""
    world = range(2 * replicas)
    for rank, (steps, aside) in enumerate(ranks):
        stage = tuple(other for other in world if other // replicas == rank // replicas)
        is_last = rank >= replicas
        pipeline = (rank % replicas, replicas + rank % replicas)
        for batch, step in enumerate(steps):
            expected = dict(in_step(rank, batch))
            if batch < 2:  # the first batches are compared before they are cut
                expected["allgather", pipeline] = 1 + (batch == 0)  # and so is a new plan
            if replicas > 1 and is_last:
                expected["allgather", stage] = 1 + (batch < 2)  # of sample counts; whether a step changes attributes
            sharding = {call: n for call, n in step.items() if call not in expected}
            assert {call: n for call, n in step.items() if call in expected} == expected, (rank, batch)
            # gathers and reductions of the stage's own shards; with one replica there are none
            assert all(group == stage for _, group in sharding), (rank, batch, sharding)
            assert replicas > 1 or not sharding, (rank, batch, sharding)
            reductions = sum(n for (name, _), n in sharding.items() if "scatter" in name)
            assert (reductions > 0) == (replicas > 1 and steps_at(batch)), (rank, batch, sharding)
        told = {("send" if is_last else "recv", pipeline): NUM_BATCHES}
        if replicas > 1 and is_last:
            told["allgather", stage] = NUM_BATCHES
        assert aside == told, rank


def always(batch: int) -> bool:
    return True


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_step_has_no_collective_along_the_pipeline(pool: WorkerPool, replicas: int) -> None:
    """Nor has one at the interval of the loggers (batch 3), where ranks only wait for what is sent anyway."""
    ranks = pool.run(counted_fit, replicas, {}, world_size=2 * replicas)
    check_counts(ranks, replicas, in_step=lambda rank, batch: {}, steps_at=always)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_clipping_by_norm_adds_one_number(pool: WorkerPool, replicas: int) -> None:
    ranks = pool.run(counted_fit, replicas, {"gradient_clip_val": 0.5}, world_size=2 * replicas)
    world = tuple(range(2 * replicas))
    check_counts(ranks, replicas, in_step=lambda rank, batch: {("allreduce", world): 1}, steps_at=always)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_accumulated_batches_reduce_once(pool: WorkerPool, replicas: int) -> None:
    ranks = pool.run(counted_fit, replicas, {"accumulate_grad_batches": 2}, world_size=2 * replicas)
    check_counts(ranks, replicas, in_step=lambda rank, batch: {}, steps_at=lambda batch: batch % 2 == 1)


# ---------------------------------------------------------------- steps overlap

LONGEST_WAIT_S = 40


class Holds(Logs):
    """The last stage does not end a batch before the other stage says that it has begun the next one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.strategy.pipeline_rank == 0:
            _get_default_store().set(f"begun/{self.global_rank}/{batch_idx}", "yes")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hold()

    def hold(self) -> None:
        batch = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        strategy = self.trainer.strategy
        if strategy.pipeline_rank == 1 and 2 <= batch < NUM_BATCHES - 1:
            key = f"begun/{strategy.data_parallel_rank}/{batch + 1}"
            try:
                _get_default_store().wait([key], timedelta(seconds=LONGEST_WAIT_S))
            except dist.DistStoreError:
                message = f"stage 0 waits for stage 1 to end batch {batch} before it begins the next one"
                raise AssertionError(message) from None


def held_fit(replicas: int, progress_bar: bool) -> float:
    run = trainer(2 * replicas, strategy(replicas), log_every_n_steps=100, enable_progress_bar=progress_bar)
    run.fit(Holds(), data(replicas))
    return float(run.callback_metrics["loss"])


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("replicas", "progress_bar"), [(1, True), (2, False)])
def test_a_rank_begins_the_next_step_before_the_last_one_has_ended(
    pool: WorkerPool, replicas: int, progress_bar: bool
) -> None:
    losses = pool.run(held_fit, replicas, progress_bar, world_size=2 * replicas, timeout=3 * LONGEST_WAIT_S)
    assert len(set(losses)) == 1


class KeepsWeightGradient(nn.Linear):
    """Its W is a call that the schedule decides on."""

    on_w: Callable[[], None]

    def backward_dw(self) -> None:
        self.on_w()


class HoldsW(Holds):
    """The last stage does not end its last W of a batch before the other stage says that it has begun the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1] = KeepsWeightGradient(8, 8)
        self.blocks[-1].on_w = self.on_w
        self.num_ws = 0

    def on_w(self) -> None:
        self.num_ws += 1
        if self.num_ws % 2 == 0:  # of two microbatches
            self.hold()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.trainer.strategy.pipeline_rank == 0 or self.num_ws % 2 == 0 < self.num_ws


def held_w_fit() -> float:
    run = trainer(2, strategy(schedule="zb_h1"), log_every_n_steps=100)
    run.fit(HoldsW(), data())
    return float(run.callback_metrics["loss"])


def test_what_a_batch_came_to_is_told_before_the_last_stage_has_run_its_backwards(pool: WorkerPool) -> None:
    losses = pool.run(held_w_fit, world_size=2, timeout=3 * LONGEST_WAIT_S)
    assert len(set(losses)) == 1


class Early(Logs):
    """The first stage does not begin a microbatch before the last one has begun the same microbatch's step."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        if batch_idx >= 2:  # the batches before are compared first, and costs are measured in them
            self.begun[batch_idx] += 1
            key = f"early/{batch_idx}/{self.begun[batch_idx]}"
            if strategy.pipeline_rank == 1:
                _get_default_store().set(key, "yes")
            else:
                try:
                    _get_default_store().wait([key], timedelta(seconds=LONGEST_WAIT_S))
                except dist.DistStoreError:
                    message = f"stage 1 waits for stage 0 before it runs any code of batch {batch_idx}"
                    raise AssertionError(message) from None
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return (self(x) - y).square().sum()  # a mean would have the last stage count what it divides by first


def early_fit() -> float:
    run = trainer(2, strategy(), log_every_n_steps=100)
    run.fit(Early(), data())
    return float(run.callback_metrics["loss"])


def test_code_before_a_received_value_runs_while_it_is_under_way(pool: WorkerPool) -> None:
    losses = pool.run(early_fit, world_size=2, timeout=3 * LONGEST_WAIT_S)
    assert len(set(losses)) == 1


# ---------------------------------------------------------------- what is read in between is right


class Reads(pl.Callback):
    """Notes metrics and outputs after every batch, or after some."""

    def __init__(self, every: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.every, self.ranks = every, ranks
        self.metrics: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.kept: list[Any] = []

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())  # type: ignore[arg-type] # read at the end

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs)
        if (batch_idx + 1) % self.every == 0 and trainer.global_rank in self.ranks:
            self.metrics.append({key: float(value) for key, value in trainer.callback_metrics.items()})


class Returns(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= 3:  # a key that comes late
            self.log("late", loss * 2, on_step=True, on_epoch=True)
        return {"loss": loss, "twice": 2 * loss.detach(), "batch": batch_idx}


def reading_fit(devices: int, every: int, ranks: tuple[int, ...]) -> Any:
    reads = Reads(every, ranks)
    run = trainer(
        devices, strategy() if devices > 1 else "auto", callbacks=[reads], log_every_n_steps=100, max_epochs=2
    )
    run.fit(Returns(), data())
    return {
        "metrics": reads.metrics,
        "at the end": {key: float(value) for key, value in run.callback_metrics.items()},
        "losses": [float(loss) for loss in reads.losses],
        "outputs": [{key: float(value) for key, value in outputs.items()} for outputs in reads.kept],
        "kinds": sorted({type(value).__name__ for outputs in reads.kept for value in (outputs, *outputs.values())}),
    }


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("every", "readers"), [(1, (0, 1)), (3, (0, 1)), (3, (0,)), (3, (1,))])
def test_whoever_looks_sees_what_one_device_has(pool: WorkerPool, every: int, readers: tuple[int, ...]) -> None:
    expected = reading_fit(1, every, (0,))
    for rank, found in enumerate(pool.run(reading_fit, 2, every, readers, world_size=2)):
        if rank not in readers:
            assert found.pop("metrics") == []
        assert found.pop("kinds") == expected["kinds"] == ["Tensor", "dict", "int"]
        for key, values in found.items():
            for mine, theirs in zip(
                values if isinstance(values, list) else [values], _listed(expected[key]), strict=True
            ):
                assert mine == pytest.approx(theirs, rel=1e-5), (rank, key)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------- ending together


class Signalled(Logs):
    """One rank is told to end, in the middle of a step."""

    def __init__(self, rank: int, batch: int) -> None:
        super().__init__()
        self.rank, self.batch = rank, batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == self.rank and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def signalled_fits(replicas: int, accumulate: int, folder: Path) -> list[tuple[int, int, bool, Any]]:
    ends = []
    for rank in range(2 * replicas):
        root = folder / str(rank)
        run = trainer(2 * replicas, strategy(replicas), accumulate_grad_batches=accumulate, default_root_dir=root)
        try:
            run.fit(Signalled(rank, 2), loader(num_samples=4 * 30 * replicas, batch_size=4))
        except SIGTERMException as end:
            completed = run.fit_loop.epoch_loop.batch_progress.current.completed
            ends.append((completed, run.global_step, run.received_sigterm, end.code))
    return ends


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.nightly)])
def test_a_sigterm_ends_all_ranks_before_the_same_batch(
    pool: WorkerPool, replicas: int, accumulate: int, tmp_path: Path
) -> None:
    ranks = pool.run(signalled_fits, replicas, accumulate, tmp_path, world_size=2 * replicas)
    for ends in ranks:
        assert ends == ranks[0] and len(ends) == 2 * replicas
    for num_batches, num_steps, received, code in ranks[0]:
        assert received and code == 143
        # told in the third, set by the time of the next, and not within an accumulation
        assert num_batches == {1: 4, 3: 6}[accumulate] and num_steps == num_batches // accumulate
    for rank in range(2 * replicas):
        assert [path.name for path in (tmp_path / str(rank)).iterdir()] == [
            f"preempted-epoch=0-step={ranks[0][rank][1]}.ckpt"
        ]
