"""What ``schedule=`` names, asked for programs: each kind against schedules that are built or written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.schedule import Placement, StageCosts, build_schedule

# three microbatches on two ranks, in an order that no family has
WRITTEN = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n"
WITHOUT_THE_LAST = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.csv"
    file.write_text(WRITTEN)
    return file


def test_a_file_gives_its_first_microbatches_and_its_placement(path: Path) -> None:
    source = schedule_source(path)
    assert source.name == str(path) and not source.is_searched
    assert source.placements(2) == [Placement.interleaved(2)]
    assert source.num_microbatches("auto") == 3 and source.num_microbatches(2) == 2
    assert source.program(Placement.interleaved(2), 3).csv_text() == WRITTEN
    assert source.program(Placement.interleaved(2), 2).csv_text() == WITHOUT_THE_LAST
    with pytest.raises(ScheduleError, match="cut into 4 microbatches, but .* is for 3. Set num_microbatches=3"):
        source.program(Placement.interleaved(2), 4)
    with pytest.raises(ConfigurationError, match="has rows for 2 ranks, but the pipeline has 3"):
        source.placements(3)


def test_a_limit_has_to_be_kept_by_all_that_a_file_has(path: Path) -> None:
    source, costs = schedule_source(path), StageCosts(1.0, 1.0, 1.0)
    assert source.program(Placement.interleaved(2), 2, costs, 3.0).num_microbatches == 2
    with pytest.raises(ScheduleError):
        source.program(Placement.interleaved(2), 2, costs, 2.0)


@pytest.mark.parametrize(("name", "stages_per_rank", "kind"), [("1f1b", 1, "one chunk"), ("zb_v", 2, "V")])
def test_a_name_gives_what_is_built_by_it(name: str, stages_per_rank: int, kind: str) -> None:
    source = schedule_source(name)
    [placement] = source.placements(2)
    assert placement.kind == kind and placement.num_stages == 2 * stages_per_rank
    for number in (2, 5):
        built = build_schedule(name, num_ranks=2, num_microbatches=number)
        assert source.program(placement, number).programs == built.programs
    assert source.memory_limit(3.0, StageCosts(1.0, 1.0, 1.0), placement) == 3.0
    # stages that the family cannot have are not asked of it
    assert schedule_source(name).with_stages_per_rank(7).placements(2) == [placement]


def test_a_search_chooses_among_placements_unless_their_size_is_known() -> None:
    one, v, two = Placement.interleaved(2), Placement.v_shaped(2), Placement.interleaved(2, 2)
    source = schedule_source("auto")
    assert source.is_searched
    assert source.placements(2) == [one, v, two]
    assert source.placements(2, 1) == [one]
    assert schedule_source("auto", stages_per_rank=2).placements(2, 1) == [v, two]
    assert source.placements(1) == [Placement.interleaved(1)]
    for placement in (one, v):
        assert source.program(placement, 4, StageCosts(1.0, 1.0, 1.0), quick=True).placement == placement
