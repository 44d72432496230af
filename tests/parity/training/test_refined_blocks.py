"""A pipeline whose cuts fall inside blocks gives the losses and weights of one device, under the same names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_models import DATASETS, MODELS, LlamaFloat64Loss
from parity_run import QUIET, Layout, Outcome, Settings, check_like_one_device, train_pipelined
from pool import WorkerPool
from small_models import Descends
from test_resume import FILE, ONE_DEVICE, check_chain
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy.plan_only import FirstStep, look_at_first_step

# before the feed-forward part of one block, and before attention's of another
GPT2 = ("model.transformer.h.0.mlp", "model.transformer.h.2.attn", "model.transformer.h.3.mlp")
LLAMA = ("model.model.layers.0.mlp", "model.model.layers.1.post_attention_layernorm", "model.model.layers.3.self_attn")
T5 = ("model.encoder.block.1.layer.1", "model.decoder.block.0.layer.1", "model.decoder.block.2.layer.2")
VIT = ("encoder.layers.0.linear2", "encoder.layers.2.self_attn", "encoder.layers.3.norm2")
SHARDED = {"sharding": "full_shard"}


class SelfCheckpointed(LlamaFloat64Loss):
    """Llama whose blocks checkpoint themselves."""

    def build(self) -> None:
        super().build()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


MODELS["self_checkpointed"] = SelfCheckpointed
DATASETS["self_checkpointed"] = DATASETS["llama_float64_loss"]

CASES: list[tuple[str, Layout, Sequence[str], dict[str, Any]]] = [
    ("gpt2_float64_loss", Layout("zb_h1", 2, 1, 3), GPT2[1:2], {}),
    ("gpt2_float64_loss", Layout("zb_v", 2, 1, 4), GPT2, {}),
    ("llama_float64_loss", Layout("zb_h1", 3, 1, 4), LLAMA[:2], {"activation_checkpointing": True}),
    ("llama_float64_loss", Layout("1f1b", 2, 2, 2), LLAMA[1:2], SHARDED),
    ("self_checkpointed", Layout("zb_h2", 3, 1, 4), LLAMA[:2], {}),
    ("t5", Layout("interleaved_zb", 2, 1, 4), T5, {}),
    ("vit", Layout("zb_h2", 3, 1, 4), VIT[1:], {}),
]
# what differs from another case in its schedule, its replicas or its model alone
_AT_NIGHT = [CASES[0], CASES[2], CASES[3], CASES[5]]
_MORE: list[tuple[str, Layout, Sequence[str], dict[str, Any]]] = [
    *_AT_NIGHT,
    *(
        (model, Layout(schedule, ranks, 1, 4), points, {})
        for model, points in (
            *(("gpt2_float64_loss", GPT2), ("llama_float64_loss", LLAMA), ("self_checkpointed", LLAMA)),
            *(("t5", T5), ("vit", VIT)),
        )
        for schedule, ranks in (("zb_h1", 4), ("zb_h2", 4), ("zb_v", 2), ("v_half", 2), ("v_min", 2), ("dualpipe_v", 2))
    ),
    ("self_checkpointed", Layout("1f1b", 2, 2, 2), LLAMA[1:2], SHARDED),
]


def train_cut_inside(settings: Settings, layout: Layout, options: dict[str, Any]) -> Outcome:
    """In a worker, which by this knows the model of this file."""
    return train_pipelined(settings, layout, options)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("model", "layout", "split_points", "options"),
    [
        *(case for case in CASES if case not in _AT_NIGHT),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in _MORE),
    ],
    ids=str,
)
def test_cuts_inside_blocks_train_as_one_device(
    pool: WorkerPool, model: str, layout: Layout, split_points: Sequence[str], options: dict[str, Any]
) -> None:
    settings = Settings(model, accumulate=2, clip_val=0.05, clip_algorithm="norm", num_samples=22, only_trains=True)
    options = {**options, "split_points": list(split_points)}
    outcomes = pool.run(train_cut_inside, settings, layout, options, world_size=layout.world_size, timeout=120)
    check_like_one_device(outcomes, settings, layout)


@pytest.mark.nightly
def test_checkpoints_go_on_with_whole_blocks_and_on_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    cut_inside = Layout("zb_h1", 3, 1, 3), {"options": {"split_points": list(GPT2[:2])}}
    check_chain(pool, tmp_path, [cut_inside, (Layout("1f1b", 2, 1, 3), FILE), (ONE_DEVICE, FILE)])


class Block(nn.Module):
    """Four layers of a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.first, self.second, self.down = (nn.Linear(width, width) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.first(self.up(h).tanh())
        return h + self.down(self.second(h).tanh())


class Three(Descends):
    """Three blocks, which two ranks can only share out as two and one if they stay whole."""

    def __init__(self, width: int = 192, length: int = 160) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shape = length, width
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.losses: list[float] = []
        self.refined: tuple[str, ...] = ()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if isinstance(self.trainer.strategy, PipelineParallelStrategy):
            refinement = self.trainer.strategy.engine.split.refinement
            self.refined = () if refinement is None else refinement.blocks

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(torch.randn(16, *self.shape, generator=generator), batch_size=8)


def fit_three(
    strategy: PipelineParallelStrategy | None = None, *size: int
) -> tuple[list[float], tuple[str, ...], list[str]]:
    """Losses, the blocks that are cut inside, and the names of this rank's parameters."""
    trainer = L.Trainer(
        **QUIET, precision="64-true", max_epochs=1, devices=2 if strategy else 1, strategy=strategy or "auto"
    )
    module = Three(*size)
    trainer.fit(module)
    return module.losses, module.refined, [name for name, _ in module.named_parameters()]


def on_two_ranks(schedule: str, **options: Any) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(2, num_microbatches=4, schedule=schedule, check_first_batches=False, **options)


def fit_two_ranks() -> tuple[list[float], tuple[str, ...], list[str]]:
    """In a worker."""
    return fit_three(on_two_ranks("zb_h1"))


def test_training_cuts_inside_a_block_where_that_is_faster(pool: WorkerPool) -> None:
    expected, _, names = fit_three()
    found = pool.run(fit_two_ranks, world_size=2, timeout=120)
    for losses, refined, _ in found:
        assert refined == ("blocks.1",)
        assert losses == pytest.approx(expected, rel=1e-9)
    (_, _, first), (_, _, second) = found
    assert sorted([*first, *second]) == sorted(names)
    assert any(name.startswith("blocks.1.") for name in first) and any(name.startswith("blocks.1.") for name in second)


LARGE = 1024, 2


def fit_in_memory() -> tuple[tuple[list[float], tuple[str, ...], list[str]], str]:
    """In a worker: with less memory than cuts between whole blocks need; and why cuts are inside."""
    with pytest.raises(ConfigurationError, match="the best one needs") as refusal:
        fit_three(on_two_ranks("1f1b", device_memory_gib=1e-3, units=["blocks.*"]), *LARGE)
    needed = re.search(r"best one needs ([\d.]+) GiB", str(refusal.value))
    assert needed is not None
    limited = on_two_ranks("1f1b", device_memory_gib=0.95 * float(needed[1]))
    return fit_three(limited, *LARGE), str(limited.engine.split.refinement)


def test_training_cuts_inside_a_block_where_whole_ones_do_not_fit(pool: WorkerPool) -> None:
    expected, _, _ = fit_three(None, *LARGE)
    for (losses, refined, _), why in pool.run(fit_in_memory, world_size=2, timeout=120):
        assert refined == ("blocks.1",)
        assert why.endswith("no cut between whole blocks stays within the memory limit.")
        assert losses == pytest.approx(expected, rel=1e-9)


WIDTH = 192
# widths of the block in the middle; a cut inside of it is worth 2 % of a step for some of them
AT_THE_EDGE = {"zb_h1": (24, 30, 32, 40), "auto": (28, 30)}


class ThreeUnequal(Descends):
    """Two equal blocks with a smaller one between them; how much smaller says what a cut inside of it is worth."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hidden(WIDTH, width) for width in (WIDTH, inner, WIDTH))
        self.stages: dict[str, int] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.trainer.strategy, PipelineParallelStrategy)
        self.stages = dict(self.trainer.strategy.engine.split.partition.stage_of_unit)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(8, 160, WIDTH), batch_size=8)


class Hidden(nn.Module):
    """Two residuals with a hidden layer each."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.other_up, self.other_down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.down(self.up(h).tanh())
        return h + self.other_down(self.other_up(h).tanh())


def fit_unequal(schedule: str) -> list[dict[str, int]]:
    """In a worker: the stage of each unit, for each model."""
    found = []
    for inner in AT_THE_EDGE[schedule]:
        strategy = on_two_ranks(schedule)
        module = ThreeUnequal(inner)
        L.Trainer(**QUIET, max_steps=1, devices=2, strategy=strategy).fit(module)
        found.append(module.stages)
    return found


def planned_unequal(inner: int, schedule: str) -> dict[str, int]:
    """The stage of each unit, as the plan has it."""
    strategy = on_two_ranks(schedule)
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 2

    def look(step: FirstStep) -> dict[str, int]:
        cutter = step.cutter(strategy.options, strategy.sizes)
        return dict(cutter.split(cutter.placement()).split.partition.stage_of_unit)

    return look_at_first_step({}, ThreeUnequal(inner), None, look)


@pytest.mark.parametrize("schedule", [pytest.param("zb_h1", marks=pytest.mark.nightly), "auto"])
def test_the_plan_cuts_as_training_does_where_it_is_close(pool: WorkerPool, schedule: str) -> None:
    planned = [planned_unequal(inner, schedule) for inner in AT_THE_EDGE[schedule]]
    assert len({"blocks.1" in stages for stages in planned}) == 2  # some cut the block in the middle, some do not
    for stages in pool.run(fit_unequal, schedule, world_size=2, timeout=120):
        assert stages == planned
