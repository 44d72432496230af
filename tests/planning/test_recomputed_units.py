"""``activation_checkpointing="auto"``: which blocks are recomputed for a limit of memory, and trainings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from layouts import recorded_training
from pool import WorkerPool
from test_device_memory import GIB, TableFirst, model, tokens, train

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.refinement.choice import CutChoice
from lightning_pp.planning.refinement.recomputed import recomputed_units
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_model import RecordedModel, with_recomputation
from lightning_pp.planning.tuning import LayoutRequest

NUM_MICROBATCHES = 8


@pytest.fixture(scope="module")
def recording() -> RecordedModel:
    """Blocks whose activations are more than all parameters."""
    return recorded_training(TableFirst(vocabulary=50), tokens(2, 256) % 50, num_stages=4)


def request(limit_bytes: float, schedule: str, num_ranks: int) -> Any:
    options = ScheduleOptions(schedule_source(schedule))
    plain = LayoutRequest(options, num_ranks, NUM_MICROBATCHES, CutOptions(None), "cpu")
    return lambda one: replace(plain, memory=DeviceMemory(limit_bytes / GIB, model(), one, {}))


def unlimited(recording: RecordedModel, schedule: str, num_ranks: int) -> Any:
    asked = request(1.0, schedule, num_ranks)
    return CutChoice(recording, lambda one: replace(asked(one), memory=None), None).layout()[1]


def needs(recording: RecordedModel, names: Any, layout: Any) -> list[float]:
    memory = DeviceMemory(1.0, model(), with_recomputation(recording, list(names)), {})
    return [need.peak_bytes for need in memory.needs(layout.partition, layout.placement, layout.start)]


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 4), ("1f1b", 2), ("gpipe", 3), ("interleaved_1f1b", 2)])
def test_each_rank_recomputes_as_few_blocks_as_it_can(recording: RecordedModel, schedule: str, num_ranks: int) -> None:
    layout = unlimited(recording, schedule, num_ranks)
    blocks = [name for name in recording.units if name.startswith("blocks.")]
    most, least = max(needs(recording, (), layout)), max(needs(recording, blocks, layout))
    limit = 0.5 * (most + least)
    found = recomputed_units(recording, request(limit, schedule, num_ranks))
    held = needs(recording, found, layout)
    assert max(held) <= limit < most
    rank_of = {name: layout.placement.rank_of_stage[layout.partition.stage_of_unit[name]] for name in blocks}
    number = Counter(rank_of[name] for name in found)
    for rank in range(num_ranks):  # no fewer of its own blocks would do, whichever they are
        own = [name for name in blocks if rank_of[name] == rank]
        if number[rank]:
            fewer = (needs(recording, some, layout)[rank] for some in combinations(own, number[rank] - 1))
            assert min(fewer) > limit
    if schedule == "1f1b":
        assert number[0] == max(number.values()) > number[num_ranks - 1], "early ranks hold most"


def test_a_limit_that_is_kept_anyway_and_one_that_cannot_be(recording: RecordedModel) -> None:
    most = max(needs(recording, (), unlimited(recording, "1f1b", 2)))
    assert recomputed_units(recording, request(1.01 * most, "1f1b", 2)) == []
    blocks = [name for name in recording.units if name.startswith("blocks.")]
    assert recomputed_units(recording, request(0.01 * most, "1f1b", 2)) == blocks


def test_auto_needs_a_limit() -> None:
    with pytest.raises(ConfigurationError, match="asks for, but that is not given"):
        PipelineParallelStrategy(activation_checkpointing="auto")


def fit(limit_gib: float | None, **options: Any) -> tuple[list[float], list[str]]:
    """In a worker: the losses of a training, and the recomputed units."""
    found: list[str] = []

    class Noted(PipelineParallelStrategy):
        def teardown(self) -> None:
            recomputation = self.engine.split.recomputation
            found.extend(sorted(recomputation.units if recomputation is not None else ()))
            super().teardown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_device_memory.PipelineParallelStrategy", Noted)
        losses = train(limit_gib, vocabulary=50, length=256, **options)[0]
    return losses, found


def test_training_recomputes_what_was_chosen(pool: WorkerPool, recording: RecordedModel) -> None:
    expected = train(None, vocabulary=50, length=256, num_ranks=1)[0]
    # batches of 8 samples in 4 microbatches of 2, as recorded
    layout = unlimited(recording, "1f1b", 2)
    blocks = [name for name in recording.units if name.startswith("blocks.")]
    limit = 0.4 * max(needs(recording, (), layout)) + 0.6 * max(needs(recording, blocks, layout))
    for losses, names in pool.run(fit, limit / GIB, activation_checkpointing="auto", world_size=2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert 0 < len(names) < len(blocks)
        assert names[0] == "blocks.0"
