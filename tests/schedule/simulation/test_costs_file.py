"""Costs written to a file come back as they were; what is wrong with a file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_strategies import stage_costs

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule import StageCosts
from lightning_pp.schedule.simulation.costs_file import read_costs_file

GOOD = {
    "format": "lightning_pp.StageCosts/1",
    "units": {"time": "ms", "held": "GiB"},
    "costs": {"forward": [1.0, 2.0], "backward_input": 1.0, "backward_weight": [0.5, 0.25]},
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5).flatmap(stage_costs))
def test_costs_come_back_exactly(tmp_path: Path, costs: StageCosts) -> None:
    costs.to_json(tmp_path / "costs.json")
    assert StageCosts.from_json(tmp_path / "costs.json") == costs


def test_a_file_tells_units_and_origin(tmp_path: Path) -> None:
    path = tmp_path / "made" / "costs.json"
    costs = StageCosts(1.0, [1.0, 2.0], 3.0, held_after_forward=[0.5, 0.25], p2p=[0.5, 0.0], p2p_back=[0.0, 0.75])
    costs.to_json(path, held_unit="GiB", measured_on={"device": "cpu", "rank_of_stage": [0, 1]})
    read = read_costs_file(path)
    assert StageCosts.from_json(path) == costs
    assert (read.held_unit, read.num_stages, read.measured_on["rank_of_stage"]) == ("GiB", 2, [0, 1])
    content = json.loads(path.read_text())
    assert content["units"] == {"time": "ms", "held": "GiB"}
    assert content["costs"]["backward_input"] == [1.0, 2.0]
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"]


def test_defaults_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD))
    assert StageCosts.from_json(path) == StageCosts([1.0, 2.0], 1.0, [0.5, 0.25])


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"format": "other"}, r"\"format\" is 'other'.*lightning_pp\.StageCosts/1"),
        ({"units": {"time": "s"}}, r"times are in 's'.*milliseconds"),
        ({"units": "ms"}, r'"units" is of type str'),
        ({"costs": {"forward": 1.0, "wait": 2}}, r"backward_input is missing.*'wait' is not a cost.*p2p"),
        ({"costs": {**GOOD["costs"], "p2p": "fast"}}, r"p2p is 'fast'.*one for each stage"),
        ({"costs": {**GOOD["costs"], "p2p": []}}, r"p2p is \[\]"),
        ({"costs": {**GOOD["costs"], "p2p": [1.0]}}, r"costs\.json: .*different numbers of stages.*'p2p': 1"),
        ({"costs": {**GOOD["costs"], "forward": [1.0, -2.0]}}, r"costs\.json: .*forward\[1\] is -2\.0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], pattern: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ScheduleError, match=pattern):
        StageCosts.from_json(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"cannot read the costs .*nowhere\.json"):
        StageCosts.from_json(tmp_path / "nowhere.json")
    (tmp_path / "costs.json").write_text("forward: 1")
    with pytest.raises(ScheduleError, match=r"costs\.json is not a JSON"):
        StageCosts.from_json(tmp_path / "costs.json")
