"""Collectives in hooks go among replicas, and what Lightning decides together goes over all ranks."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pp import PipelineParallelStrategy


def strategy(replicas: int, microbatches: int = 4) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(2, replicas, num_microbatches=microbatches, schedule="1f1b")


class Gathers(Blocks):
    """Collectives in hooks, as published modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gathered = self.all_gather({"rows": len(batch[0]), "loss": outputs["loss"]})
        strategy = self.trainer.strategy
        self.found["rows"] = (tuple(gathered["rows"].shape), int(gathered["rows"].sum()))
        self.found["losses"] = tuple(gathered["loss"].shape)
        self.found["sum"] = float(strategy.reduce(torch.tensor(2.0), reduce_op="sum"))
        self.found["mean"] = float(strategy.reduce(torch.tensor(3.0), group=torch.distributed.group.WORLD))
        self.found["any"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
        self.found["all"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=True)
        x = torch.full((3,), float(self.trainer.global_rank), requires_grad=True)
        y = self.all_gather(x, sync_grads=True)
        (y * 2.0).sum().backward()
        self.found["gradient"] = (tuple(y.shape), x.grad.tolist())  # type: ignore[union-attr]
        self.found["without"] = self.all_gather(x).requires_grad


def gathers(replicas: int | None, microbatches: int = 4) -> tuple[dict[str, Any], tuple[int, int]]:
    devices = 1 if replicas is None else 2 * replicas
    module = Gathers()
    run = trainer(devices, strategy(replicas, microbatches) if replicas else "auto")
    run.fit(module, loader())
    places = (0, 0) if replicas is None else (run.strategy.data_parallel_size, run.strategy.data_parallel_rank)  # type: ignore[attr-defined]
    return module.found, places


@pytest.mark.by_day(1)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_replica_gathers_as_one_device(pool: WorkerPool, microbatches: int) -> None:
    [(expected, _)] = pool.run(gathers, None, world_size=1)
    for found, places in pool.run(gathers, 1, microbatches, world_size=2):
        assert places == (1, 0)
        assert found.pop("all") is False and expected.get("all") is True  # over all ranks, as Lightning needs it
        assert found == {key: value for key, value in expected.items() if key != "all"}


def test_replicas_gather_among_themselves(pool: WorkerPool) -> None:
    for rank, (found, places) in enumerate(pool.run(gathers, 2, 2, world_size=4)):
        assert places == (2, rank % 2)
        assert found["rows"] == ((2,), 4) and found["losses"] == (2,)
        assert found["sum"] == 4.0 and found["mean"] == 3.0
        assert found["any"] is True and found["all"] is False
        assert found["gradient"] == ((2, 3), [4.0] * 3)  # of both replicas, not of all four ranks
        assert found["without"] is False


class InAStep(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.all_gather(loss, sync_grads=True).mean()  # the line that the message names


class WaitsInAStep(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.strategy.barrier()  # the line that the message names
        return super().training_step(batch, batch_idx)


def line_of(kind: type[Blocks]) -> int:
    lines, first = inspect.getsourcelines(kind)
    return first + next(index for index, line in enumerate(lines) if "the line that the message names" in line)


def fit(kind: type[Blocks], replicas: int, microbatches: int = 2) -> list[float]:
    module = kind()
    losses: list[float] = []
    vars(module)["on_train_batch_end"] = lambda outputs, *_: losses.append(float(outputs["loss"]))
    trainer(2 * replicas, strategy(replicas, microbatches)).fit(module, loader())
    return losses


@pytest.mark.parametrize(("kind", "name", "replicas"), [(InAStep, "all_gather", 2), (WaitsInAStep, "barrier", 1)])
def test_collectives_in_a_step_are_refused(pool: WorkerPool, kind: type[Blocks], name: str, replicas: int) -> None:
    report = pool.run(fit, kind, replicas, world_size=2 * replicas, timeout=60, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and failure.type == "ConfigurationError", failure
        place = rf"training_step calls strategy\.{name} among 2 ranks, at .*test_collectives.py:{line_of(kind)} in"
        assert re.search(place, failure.message), failure.message
        assert "on_train_batch_end" in failure.message
    assert report.seconds < 40


def test_one_replica_may_gather_in_a_step(pool: WorkerPool) -> None:
    plain, gathering = (pool.run(fit, kind, 1, world_size=2) for kind in (Blocks, InAStep))
    assert plain == gathering


class Scales(Blocks):
    """Its learning rate goes by the number of replicas."""

    def configure_optimizers(self) -> Any:
        self.sizes = [self.trainer.world_size, self.trainer.global_rank, self.trainer.num_devices]
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.strategy.data_parallel_size)  # type: ignore[union-attr]


def scales(replicas: int) -> tuple[list[int], float, list[int]]:
    module = Scales()
    run = trainer(2 * replicas, strategy(replicas, 2))
    run.fit(module, loader())
    asked = [run.strategy.world_size, run.strategy.num_ranks]  # type: ignore[attr-defined]
    return module.sizes, run.optimizers[0].param_groups[0]["lr"], asked


@pytest.mark.by_day(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_who_asks_for_processes_and_devices_is_told_their_number(pool: WorkerPool, replicas: int) -> None:
    """The trainer answers as with every strategy, whoever asks; the strategy knows the replicas."""
    for rank, (sizes, lr, asked) in enumerate(pool.run(scales, replicas, world_size=2 * replicas)):
        assert sizes == [2 * replicas, rank, 2 * replicas]
        assert asked == [2 * replicas] * 2
        assert lr == 0.1 * replicas


def monitored(folder: str) -> tuple[int, str, int]:
    """Callbacks of Lightning that decide together on all ranks, and its own reads of the world's size."""
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    run = trainer(2, strategy(1), max_epochs=5, enable_checkpointing=True, callbacks=[best, stop])
    run.fit(Blocks(), loader(), loader(seed=2))
    return run.current_epoch, best.best_model_path, run.strategy.num_ranks  # type: ignore[attr-defined]


def test_lightnings_own_collectives_span_all_ranks(pool: WorkerPool, tmp_path: Any) -> None:
    first, second = pool.run(monitored, str(tmp_path), world_size=2, timeout=90)
    assert first == second and first[0] == 2 and Path(first[1]).exists() and first[2] == 2


class Stream(IterableDataset[Any]):
    def __init__(self, shares_out: bool) -> None:
        self.shares_out, self.rank = shares_out, 0

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.rank if self.shares_out else 0)
        for _ in range(8):
            yield torch.randn(8, generator=generator), torch.zeros(())


def reads_a_stream(shares_out: bool) -> list[str]:
    data, run = Stream(shares_out), trainer(4, strategy(2, 2))
    data.rank = run.strategy.data_parallel_rank  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(Blocks(), DataLoader(data, 4))
    return [str(warning.message) for warning in told if "got the same batch" in str(warning.message)]


@pytest.mark.parametrize("shares_out", [True, False])
def test_a_stream_that_nobody_shares_out_is_noticed(pool: WorkerPool, shares_out: bool) -> None:
    first, *others = pool.run(reads_a_stream, shares_out, world_size=4)
    assert others == [[], [], []] and len(first) == (0 if shares_out else 1)
    assert shares_out or "All 2 replicas got the same batch" in first[0]


def decisions_before_a_set_up() -> list[bool]:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=PipelineParallelStrategy(2), logger=False).strategy
    assert isinstance(strategy, PipelineParallelStrategy) and strategy.num_ranks == 2
    first = strategy.global_rank == 0
    return [strategy.reduce_boolean_decision(first), strategy.reduce_boolean_decision(first, all=False)]


def test_a_decision_before_a_set_up_is_each_ranks_own(pool: WorkerPool) -> None:
    """As callbacks that are tried outside of a fit ask for it; torch raised that there is no process group."""
    assert pool.run(decisions_before_a_set_up, world_size=2) == [[True, True], [False, False]]
