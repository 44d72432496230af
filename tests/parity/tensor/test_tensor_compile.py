"""Units that are compiled and cut train what one device trains, uncompiled, in float64 to 1e-9."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from parity_run import Layout, Outcome, Settings, check_like_one_device, train
from pool import WorkerPool

# of one size: each size is compiled by itself, and takes long
SETTINGS = Settings("short_llama", clip_val=0.05, optimizer="adamw", num_samples=16, max_epochs=1, only_trains=True)
OF_TWO_SIZES = replace(SETTINGS, model="llama_float64_loss", accumulate=2, num_samples=22, only_trains=False)


def train_compiled(settings: Settings, layout: Layout, backend: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """In a worker: the training, how many graphs of parts were compiled, and what the log says of them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, lines, handler = CompileCounterWithBackend(backend), list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    try:
        outcome = train(settings, layout.strategy(compile={"backend": counter}, **options), layout.world_size)
    finally:
        rank_zero.log.removeHandler(handler)
    return outcome, counter.frame_count, [line for line in lines if line.startswith("compile:")]


def check(pool: WorkerPool, settings: Settings, layout: Layout, backend: str, **options: Any) -> list[str]:
    results = pool.run(train_compiled, settings, layout, backend, options, world_size=layout.world_size, timeout=280)
    outcomes: list[Outcome] = [outcome for outcome, _, _ in results]
    check_like_one_device(outcomes, settings, layout)
    assert all(num_graphs for _, num_graphs, _ in results)
    return [line for _, _, lines in results for line in lines]


def cases() -> list[Any]:
    by_day = {((1, 1, 2), "zb_h1", True)}  # tests/tensor/test_compiling.py has units without sequence_parallel
    found = []
    for sizes in ((1, 1, 2), (2, 1, 2)):
        for schedule in ("1f1b", "zb_h1"):
            for sequence in (False, True):
                case = sizes, schedule, sequence
                found.append(pytest.param(*case, marks=() if case in by_day else pytest.mark.nightly))
    return found


@pytest.mark.parametrize(("sizes", "schedule", "sequence"), cases())
def test_compiled_parts(pool: WorkerPool, sizes: tuple[int, int, int], schedule: str, sequence: bool) -> None:
    layout = Layout(schedule, *sizes[:2], 2, tensor=sizes[2])
    assert check(pool, SETTINGS, layout, "aot_eager", sequence_parallel=sequence) == []


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("layout", [Layout("1f1b", 1, 1, 2, tensor=2), Layout("zb_h1", 2, 1, 2, tensor=2)], ids=str)
def test_parts_compiled_by_inductor(pool: WorkerPool, layout: Layout, sequence: bool) -> None:
    settings = replace(OF_TWO_SIZES if layout.pipeline == 1 else SETTINGS, model="llama_float64_norms")
    assert check(pool, settings, layout, "inductor", sequence_parallel=sequence) == []


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["full_shard", "replicate"])
def test_compiled_parts_of_shards(pool: WorkerPool, sharding: str) -> None:
    layout = Layout("zb_h1", 1, 2, 2, tensor=2)
    assert check(pool, SETTINGS, layout, "aot_eager", sharding=sharding) == []


@pytest.mark.nightly
def test_compiled_parts_that_run_again_in_backward(pool: WorkerPool) -> None:
    layout = Layout("zb_h1", 1, 1, 2, tensor=2)
    assert check(pool, SETTINGS, layout, "aot_eager", activation_checkpointing=True) == []


@pytest.mark.nightly
def test_units_that_run_uncompiled_are_told(pool: WorkerPool) -> None:
    layout, settings = Layout("zb_h1", 2, 1, 2, tensor=2), replace(SETTINGS, model="mixtral_float64_loss")
    results = pool.run(train_compiled, settings, layout, "aot_eager", {}, world_size=layout.world_size, timeout=280)
    check_like_one_device([outcome for outcome, _, _ in results], settings, layout)
    (line,) = [line for _, _, lines in results for line in lines if "uncompiled" in line]
    assert "units with parts of matrices run uncompiled: model" in line and "The reason for the first: " in line
