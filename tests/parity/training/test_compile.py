"""Units compiled one by one give the training of one device, uncompiled."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core import rank_zero
from parity_run import QUIET, Layout, Outcome, ParityData, Settings, differences, make_module, merged, reference, train
from pool import WorkerPool
from small_models import Descends
from torch import nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError

SETTINGS = Settings(model="gpt2", clip_val=0.5, max_epochs=1)


def train_compiled(settings: Settings, layout: Layout, backend: str, options: dict[str, Any]) -> tuple[Outcome, int]:
    """In a worker: the training, and how many graphs were compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    outcome = train(settings, layout.strategy(compile={"backend": counter}, **options), layout.world_size)
    return outcome, counter.frame_count


def check(pool: WorkerPool, settings: Settings, layout: Layout, backend: str, **options: Any) -> None:
    results = pool.run(train_compiled, settings, layout, backend, options, world_size=layout.world_size, timeout=280)
    found = differences(merged([outcome for outcome, _ in results], layout), reference(settings))
    assert found.weight < 1e-9 and found.val_loss < 1e-6
    assert all(num_graphs > 0 for _, num_graphs in results)


def test_compiled_units_train_as_one_device_does(pool: WorkerPool) -> None:
    of_one_size = replace(SETTINGS, model="residual_mlp", num_samples=16, num_val_samples=4)
    check(pool, of_one_size, Layout("zb_h1", 2, 1, 4), "aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["replicate", "shard_grad_op", "full_shard"])
def test_compiled_and_sharded_units(pool: WorkerPool, sharding: str) -> None:
    check(pool, SETTINGS, Layout("zb_v", 2, 2, 2), "aot_eager", sharding=sharding)


@pytest.mark.nightly
def test_compiled_units_that_run_again_in_backward(pool: WorkerPool) -> None:
    check(pool, SETTINGS, Layout("zb_h1", 2, 1, 4), "aot_eager", activation_checkpointing=True)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5", "unet", "vit"])
def test_compiled_architectures(pool: WorkerPool, model: str) -> None:
    check(pool, replace(SETTINGS, model=model), Layout("zb_h1", 2, 1, 4), "aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zb", "zb_h2", "v_half", "dualpipe_v"])
def test_every_kind_of_schedule_with_inductor(pool: WorkerPool, schedule: str) -> None:
    check(pool, replace(SETTINGS, model="residual_mlp"), Layout(schedule, 2, 1, 4), "inductor")


def fit(module: LightningModule, layout: Layout, backend: str) -> None:
    """In a worker: two batches with compiled units."""
    trainer = Trainer(
        **QUIET,
        devices=layout.world_size,
        strategy=layout.strategy(compile={"backend": backend}, check_first_batches=False),
        max_steps=2,
        limit_val_batches=0,
        precision="64-true",
        use_distributed_sampler=False,
    )
    trainer.fit(module, ParityData(replace(SETTINGS, model="residual_mlp")))


def what_is_left(layout: Layout) -> list[str]:
    """In a worker: attributes that a training left on units."""
    module = make_module(replace(SETTINGS, model="residual_mlp"))
    fit(module, layout, "eager")
    return [name for name, child in module.named_modules() if "forward" in vars(child)]


def test_units_are_as_before_after_a_run(pool: WorkerPool) -> None:
    assert pool.run(what_is_left, Layout("1f1b", 2, 1, 2), world_size=2, timeout=120) == [[], []]


class Layers(Descends):
    """Units that are layers of torch, and blocks of two layers beside them if wanted."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_blocks)]
        self.layers = nn.ModuleList([nn.Linear(8, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 8)])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


def compiled_graphs(num_blocks: int, schedule: str) -> tuple[int, list[str], list[torch.Tensor]]:
    """In a worker: graphs that a training compiled, what it warned of, and the weights of the rank's first layer."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")
    module, batches = (
        Layers(num_blocks),
        [torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2)],
    )
    plain = copy.deepcopy(module)
    strategy = PipelineParallelStrategy(
        2,
        num_microbatches=4,
        schedule=schedule,
        split_points=[f"layers.{num_blocks + 1}"],
        compile={"backend": counter},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1).fit(module, DataLoader(batches, batch_size=None))
    for batch in batches:
        plain.training_step(batch).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    own = dict(module.named_parameters())
    far = [name for name, value in plain.named_parameters() if name in own and not torch.allclose(own[name], value)]
    return counter.frame_count, [str(w.message) for w in caught if "compile" in str(w.message)], far


@pytest.mark.by_day(1)
@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
def test_layers_of_torch_run_as_they_are(pool: WorkerPool, schedule: str) -> None:
    (first, warned, far), (last, _, far_last) = pool.run(compiled_graphs, 2, schedule, world_size=2, timeout=200)
    assert (first > 0, last) == (True, 0), "the blocks are on one rank, and two layers of torch on the other"
    assert (warned, far, far_last) == ([], [], [])


def test_a_model_with_nothing_to_compile_is_told(pool: WorkerPool) -> None:
    (first, warned, far), (last, others, _) = pool.run(compiled_graphs, 0, "zb_h1", world_size=2, timeout=200)
    assert (first, last, far, others) == (0, 0, [], [])
    assert len(warned) == 1 and warned[0].startswith(
        "compile compiles nothing: every unit of the model is a single layer"
    )


def told(compiled_by_user: bool) -> list[str]:
    """In a worker: what the log says of compiled units in a training."""
    torch._dynamo.reset()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    module = make_module(replace(SETTINGS, model="residual_mlp"))
    if compiled_by_user:
        next(child for child in module.modules() if isinstance(child, nn.Sequential))[-1].compile(backend="aot_eager")
    rank_zero.log.addHandler(handler)
    try:
        fit(module, Layout("zb_h1", 2, 1, 4), "aot_eager")
    finally:
        rank_zero.log.removeHandler(handler)
    return [line for line in lines if line.startswith("compile:")]


@pytest.mark.parametrize("compiled_by_user", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_weights_that_cannot_wait_are_told_once(pool: WorkerPool, compiled_by_user: bool) -> None:
    first, *others = pool.run(told, compiled_by_user, world_size=2, timeout=200)
    assert others == [[]], "only one rank tells"
    if not compiled_by_user:
        assert first == []
        return
    (line,) = first
    assert re.match(r"compile: the gradients of \d+ weights are computed in I.*: \w+\.\d+\.", line), line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("max-autotune", "compile='max-autotune' must be True, False or options of torch.compile: fullgraph"),
        ({"mode": "reduce-overhead"}, "asks for CUDA graphs.* Use mode='default' or 'max-autotune-no-cudagraphs'"),
        ({"mode": "max-autotune"}, "asks for CUDA graphs"),
        (3, "compile=3 must be True"),
        ({"options": {"triton.cudagraphs": True}}, "asks for CUDA graphs"),
        ({"backnd": "eager"}, "compile has backnd, which torch.compile does not take. Its options are: fullgraph"),
    ],
)
def test_wrong_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PipelineParallelStrategy(compile=copy.copy(options))
