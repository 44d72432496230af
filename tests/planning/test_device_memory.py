"""Cuts and schedules within what a device may hold altogether, against arithmetic and against what ranks do hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from layouts import choose_layout, recorded_training
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Losses
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions
from lightning_pp.planning.tuning import Layout, LayoutRequest
from lightning_pp.split.memory.state_memory import StepDtypes

GIB = 2.0**30
NUM_BLOCKS, WIDTH, VOCABULARY = 10, 48, 2500
# a parameter, its gradient and AdamW's two states
BYTES_PER_PARAMETER = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class TableFirst(pl.LightningModule):
    """An embedding with most of the parameters and none of the operations, and blocks."""

    def __init__(self, optimizer: str = "AdamW", vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h)
        return self.head(h).square().mean()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-3)


def tokens(num_samples: int = 8, length: int = 16) -> Tensor:
    return torch.randint(0, VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(1))


def recorded(activation_checkpointing: Any = False) -> RecordedModel:
    how = RecordingOptions(activation_checkpointing=activation_checkpointing)
    return recorded_training(TableFirst(), tokens(2, 16), how)


@pytest.fixture(scope="module")
def recording() -> RecordedModel:
    return recorded()


def model(num_shards: int = 1) -> MemoryModel:
    return MemoryModel.of(ShardingSettings("full_shard"), num_shards, StepDtypes())


def layout_of(
    recording: RecordedModel,
    limit_bytes: float | None = None,
    schedule: str = "1f1b",
    num_ranks: int = 2,
    num_microbatches: int = 4,
    stages_per_rank: int | None = None,
    memory_model: MemoryModel | None = None,
    split_points: list[str] | None = None,
) -> Layout:
    memory = None
    if limit_bytes is not None:
        memory = DeviceMemory(limit_bytes / GIB, memory_model or model(), recording, {})
    options = ScheduleOptions(schedule_source(schedule, stages_per_rank=stages_per_rank))
    request = LayoutRequest(options, num_ranks, num_microbatches, CutOptions(split_points), "cpu", memory)
    return choose_layout(recording.record, recording.num_parameters, request)


def state_bytes(layout: Layout, num_parameters: Mapping[str, int]) -> list[int]:
    """Parameters, gradients and AdamW's state of each rank, whole."""
    found = [0] * layout.placement.num_ranks
    for unit, stage in layout.partition.stage_of_unit.items():
        found[layout.placement.rank_of_stage[stage]] += BYTES_PER_PARAMETER * num_parameters[unit]
    return found


def needed(recording: RecordedModel, layout: Layout) -> float:
    """The most that a rank holds under a layout."""
    memory = DeviceMemory(1.0, model(), recording, {})
    return max(need.peak_bytes for need in memory.needs(layout.partition, layout.placement, layout.start))


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 2), ("zb_h1", 3), ("zb_v", 2), ("interleaved_1f1b", 2), ("auto", 2)]
)
def test_a_cut_that_is_balanced_in_time_gives_way_to_the_limit(
    recording: RecordedModel, schedule: str, num_ranks: int
) -> None:
    sizes = recording.num_parameters
    free = layout_of(recording, schedule=schedule, num_ranks=num_ranks)
    # beside the table the first rank has room for less than what it has when time is balanced
    limit = max(state_bytes(free, sizes)) - BYTES_PER_PARAMETER * sizes["blocks.0"] / 2
    limited = layout_of(recording, limit, schedule=schedule, num_ranks=num_ranks)
    assert max(state_bytes(free, sizes)) > limit >= needed(recording, limited) > max(state_bytes(limited, sizes))
    assert limited.partition.stage_of_unit != free.partition.stage_of_unit
    assert sorted(limited.partition.stage_of_unit) == sorted(free.partition.stage_of_unit)
    # a limit that the balanced cut keeps changes nothing
    loose = layout_of(recording, 1.01 * needed(recording, free), schedule=schedule, num_ranks=num_ranks)
    assert loose.partition == free.partition and loose.placement == free.placement


def test_communicators_leave_that_much_less(recording: RecordedModel) -> None:
    free = layout_of(recording)
    least = needed(recording, free)
    for taken in (0, 5000, 400_000):
        memory = DeviceMemory((least + 5000) / GIB, model(), recording, {}, taken)
        needs = memory.needs(free.partition, free.placement, free.start)
        assert max(need.peak_bytes for need in needs) == least + taken
        assert memory.fits(free.partition, free.placement, free.start) == (taken <= 5000)
        rooms = DeviceMemory(1.0, model(), recording, {}).room_gib(free.partition, free.placement)
        less = DeviceMemory(1.0, model(), recording, {}, taken).room_gib(free.partition, free.placement)
        assert [(room - its) * GIB for room, its in zip(rooms, less, strict=True)] == pytest.approx([taken] * 2)
    with pytest.raises(ConfigurationError, match=r"of communicators"):
        DeviceMemory(least / GIB, model(), recording, {}, 400_000).check(free.partition, free.placement, free.start)


def test_the_limit_keeps_the_least_time_that_it_allows(recording: RecordedModel) -> None:
    """Against every cut of two stages."""
    order = list(recording.record.first_calls())
    free = layout_of(recording)
    for share in (0.98, 0.9, 0.8):
        limit = share * needed(recording, free)
        memory = DeviceMemory(limit / GIB, model(), recording, {})
        spans = []
        for number in range(1, len(order)):
            cut = layout_of(recording, split_points=[order[number]])
            if memory.fits(cut.partition, cut.placement, cut.start):
                spans.append(max(cut.start.simulate(cut.costs).span_ms))
        found = layout_of(recording, limit)
        assert max(found.start.simulate(found.costs).span_ms) <= 1.01 * min(spans)


def test_what_counts(recording: RecordedModel) -> None:
    """Shards, checkpointed blocks and fewer microbatches each make room where there was none."""
    least = needed(recording, layout_of(recording, split_points=["blocks.0"], schedule="gpipe", num_microbatches=12))
    limit = 0.8 * least

    def fits(recording: RecordedModel = recording, **options: Any) -> bool:
        try:
            layout_of(recording, limit, schedule="gpipe", **{"num_microbatches": 12, **options})
        except ConfigurationError:
            return False
        return True

    assert not fits()
    assert fits(recorded(activation_checkpointing=True))
    assert fits(num_microbatches=4)
    table = BYTES_PER_PARAMETER * recording.num_parameters["embedding"]
    with pytest.raises(ConfigurationError, match=r"'embedding' alone needs .* more ranks do not help"):
        layout_of(recording, 0.9 * table)
    # a sharded table is gathered whole, and its gradients are whole until they are reduced
    sharded = layout_of(recording, 0.95 * table, memory_model=model(num_shards=8))
    assert sharded.partition.stage_of_unit["embedding"] == 0


def test_a_search_finds_what_a_schedule_by_hand_cannot(recording: RecordedModel) -> None:
    """With many microbatches in flight there is no room for a cut; ``auto`` holds as few as it has to."""
    limit = 1.02 * min(
        needed(recording, layout_of(recording, schedule="1f1b", num_microbatches=1, split_points=[f"blocks.{index}"]))
        for index in range(NUM_BLOCKS)
    )
    with pytest.raises(ConfigurationError, match=r"under gpipe with 16 microbatches.*v_half, v_min, auto"):
        layout_of(recording, limit, schedule="gpipe", num_microbatches=16)
    found = layout_of(recording, limit, schedule="auto", stages_per_rank=1, num_microbatches=16)
    assert found.start.num_microbatches == 16
    assert needed(recording, found) <= limit


def test_a_limit_that_nobody_can_meet(recording: RecordedModel) -> None:
    pattern = (
        r"No cut of the model into 3 stages keeps every rank within device_memory_gib=0\.0001 under zb_h1 with 4 "
        r"microbatches: the best one needs 0\.0\d+ GiB on rank \d of the pipeline \(stage \d: [\w.]+.*\): "
        r"0\.0\d+ of parameters, .* of gradients, .* of optimizer state, .*The unit 'embedding' alone needs 0\.\d+"
        r" GiB.*smaller units.*sharding over data-parallel ranks.*cpu_offload=True, or a larger device_memory_gib"
    )
    with pytest.raises(ConfigurationError, match=pattern):
        layout_of(recording, 1e-4 * GIB, schedule="zb_h1", num_ranks=3)
    with pytest.raises(ConfigurationError, match=r"device_memory_gib=0\.001 is too little for this cut under 1f1b"):
        layout_of(recording, 1e-3 * GIB, split_points=["blocks.3"])
    with pytest.raises(ConfigurationError, match=r"for this cut under 1f1b.*rank 0 .*stage 0: embedding to head"):
        layout_of(recording, 1e-3 * GIB, num_ranks=1)
    most = max(state_bytes(layout_of(recording, split_points=["blocks.0"]), recording.num_parameters))
    with pytest.raises(
        ConfigurationError, match=r"more pipeline ranks.*activation_checkpointing=True.*smaller microba"
    ):
        layout_of(recording, 1.05 * most, schedule="gpipe", num_microbatches=30)


# ---------------------------------------------------------------- in training


def train(limit_gib: float | None, optimizer: str = "AdamW", begins: str = "fit", **options: Any) -> Any:
    """In a worker: losses, the units of every stage, and the bytes of state that this rank has in the end."""
    num_ranks, vocabulary = options.pop("num_ranks", 2), options.pop("vocabulary", VOCABULARY)
    batches = tokens(24, options.pop("length", 16)) % vocabulary
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = PipelineParallelStrategy(
            **{"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "1f1b", **options},
            device_memory_gib=limit_gib,
            check_first_batches=False,
        )
    module, notes = TableFirst(optimizer, vocabulary), Losses()
    run = trainer(num_ranks, strategy, callbacks=[notes], max_steps=3, num_sanity_val_steps=0)
    loader = DataLoader(batches, batch_size=8)  # type: ignore[arg-type]
    if begins == "validate":
        run.validate(module, loader, verbose=False)
    run.fit(module, loader)
    held = list(module.parameters())
    state = [value for p in held for value in run.optimizers[0].state[p].values() if value.dim() > 0]
    gradients = [p.grad for p in held if p.grad is not None]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*held, *gradients, *state)]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    stages = None
    if num_ranks > 1:
        partition = strategy.engine.split.partition
        stages = [partition.units_of_stage(stage) for stage in range(partition.num_stages)]
    return notes.losses, stages, num_bytes


def test_training_within_the_limit_is_training(pool: WorkerPool) -> None:
    expected = train(None, num_ranks=1)[0]
    free = pool.run(train, None, world_size=2)
    limit = max(num_bytes for _, _, num_bytes in free) * 0.97
    limited = pool.run(train, limit / GIB, world_size=2)
    assert free[0][1] != limited[0][1] == limited[1][1]
    for losses, _, num_bytes in limited:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert num_bytes < limit


def test_what_the_optimizer_keeps_is_asked_of_it(pool: WorkerPool) -> None:
    """SGD keeps nothing, so that a limit is enough for it that AdamW cannot keep to."""
    table = 8 * VOCABULARY * WIDTH  # the table and its gradient
    limit = 1.5 * table / GIB
    assert max(num_bytes for _, _, num_bytes in pool.run(train, limit, "SGD", world_size=2)) < 1.5 * table
    report = pool.run(train, limit, world_size=2, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and failure.type == "ConfigurationError"
        assert "of optimizer state" in failure.message and "'embedding' alone needs" in failure.message
    assert report.seconds < 15


@pytest.mark.nightly  # by day a sharded table fits in test_what_counts
def test_shards_make_room(pool: WorkerPool) -> None:
    """Of many units alike; whole gradients, and what is gathered of parameters, stay."""
    two_by_two = {"data_parallel_size": 2, "num_microbatches": 2, "num_ranks": 4, "vocabulary": 50, "length": 4}
    whole = pool.run(train, None, sharding="replicate", world_size=4, **two_by_two)
    limit = sum(num_bytes for _, _, num_bytes in whole) / 4  # and nothing for activations
    for message in pool.refusals(None, train, limit / GIB, sharding="replicate", world_size=4, **two_by_two):
        assert "What helps: more pipeline ranks, sharding over data" in message
    for _, _, num_bytes in pool.run(train, limit / GIB, sharding="full_shard", world_size=4, **two_by_two):
        assert num_bytes < limit


def test_a_model_that_was_cut_for_validation_is_counted_again(pool: WorkerPool) -> None:
    limit = 1.5 * 8 * VOCABULARY * WIDTH / GIB
    for message in pool.refusals("ConfigurationError", train, limit, "AdamW", "validate", world_size=2):
        assert "is too little for training with AdamW (the model was not cut for it)" in message


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_limits_that_are_none(limit: float) -> None:
    with pytest.raises(ConfigurationError, match=r"device_memory_gib=.* must be a number above 0"):
        PipelineParallelStrategy(device_memory_gib=limit)
