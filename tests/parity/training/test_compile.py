"""Units compiled one by one give the training of one device, uncompiled."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from parity_run import Layout, Outcome, Settings, differences, make_module, merged, reference, train
from pool import WorkerPool

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError

SETTINGS = Settings(model="gpt2", clip_val=0.5, max_epochs=1)


def train_compiled(settings: Settings, layout: Layout, backend: str) -> tuple[Outcome, int]:
    """In a worker: the training, and how many graphs were compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    outcome = train(settings, layout.strategy(compile={"backend": counter}), layout.world_size)
    return outcome, counter.frame_count


def check(pool: WorkerPool, settings: Settings, layout: Layout, backend: str) -> None:
    results = pool.run(train_compiled, settings, layout, backend, world_size=layout.world_size, timeout=280)
    found = differences(merged([outcome for outcome, _ in results], layout), reference(settings))
    assert found.weight < 1e-9 and found.val_loss < 1e-6
    assert all(num_graphs > 0 for _, num_graphs in results)


def test_compiled_units_train_as_one_device_does(pool: WorkerPool) -> None:
    check(pool, replace(SETTINGS, model="residual_mlp"), Layout("zb_h1", 2, 1, 4), "aot_eager")


@pytest.mark.nightly
def test_compiled_and_sharded_units(pool: WorkerPool) -> None:
    check(pool, SETTINGS, Layout("zb_v", 2, 2, 2), "aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zb", "zb_h2", "v_half", "dualpipe_v"])
def test_every_kind_of_schedule_with_inductor(pool: WorkerPool, schedule: str) -> None:
    check(pool, replace(SETTINGS, model="residual_mlp"), Layout(schedule, 2, 1, 4), "inductor")


def what_is_left(layout: Layout) -> list[str]:
    """In a worker: attributes that a training left on units."""
    module = make_module(replace(SETTINGS, model="residual_mlp"))
    from lightning.pytorch import Trainer
    from parity_run import QUIET, ParityData

    trainer = Trainer(
        **QUIET,
        devices=layout.world_size,
        strategy=layout.strategy(compile={"backend": "eager"}),
        max_steps=1,
        precision="64-true",
        use_distributed_sampler=False,
    )
    trainer.fit(module, ParityData(replace(SETTINGS, model="residual_mlp")))
    return [name for name, child in module.named_modules() if "forward" in vars(child)]


def test_units_are_as_before_after_a_run(pool: WorkerPool) -> None:
    assert pool.run(what_is_left, Layout("1f1b", 2, 1, 2), world_size=2, timeout=120) == [[], []]


def told(layout: Layout, compiled: bool) -> list[str]:
    """In a worker: what the log says of compiled units in a training of six batches."""
    torch._dynamo.reset()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    options = {"compile": {"backend": "aot_eager"}} if compiled else {}
    rank_zero.log.addHandler(handler)
    try:
        train(replace(SETTINGS, model="residual_mlp", max_epochs=2), layout.strategy(**options), layout.world_size)
    finally:
        rank_zero.log.removeHandler(handler)
    return [line for line in lines if line.startswith("compile:")]


@pytest.mark.parametrize(
    ("layout", "compiled", "stages"),
    [
        (Layout("zb_h1", 2, 1, 4), True, "1"),  # stage 0 has nothing but B in both
        pytest.param(Layout("zb_v", 2, 1, 4), True, "1, 2, 3", marks=pytest.mark.nightly),
        pytest.param(Layout("1f1b", 2, 1, 4), True, None, marks=pytest.mark.nightly),
        (Layout("zb_h1", 2, 1, 4), False, None),
    ],
    ids=str,
)
def test_what_is_left_for_w_is_measured_and_told(
    pool: WorkerPool, layout: Layout, compiled: bool, stages: str | None
) -> None:
    first, *others = pool.run(told, layout, compiled, world_size=2, timeout=200)
    assert others == [[]], "only one rank tells"
    if stages is None:
        assert first == []
        return
    pattern = (
        rf"Measured per microbatch on stages {stages}: I ([\d.e+-]+) to [\d.e+-]+ ms, W [\d.e+-]+ to ([\d.e+-]+) ms\. "
        r"So W is ([\d.]+) % of the backward"
    )
    assert len(first) == 1
    found = re.search(pattern, first[0])
    assert found is not None, first[0]
    least_input, most_weight, share = map(float, found.groups())
    # every product with a weight is in a compiled unit, so W is the cost of an action with nothing to do
    assert most_weight < least_input and share < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("max-autotune", "compile='max-autotune' must be True, False or options of torch.compile: fullgraph"),
        ({"mode": "reduce-overhead"}, "asks for CUDA graphs.* Use mode='default' or 'max-autotune-no-cudagraphs'"),
        ({"mode": "max-autotune"}, "asks for CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "asks for CUDA graphs"),
        ({"backnd": "eager"}, "compile has backnd, which torch.compile does not take. Its options are: fullgraph"),
    ],
)
def test_wrong_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipelineParallelStrategy(compile=copy.copy(options))
