"""The hand-made families against closed formulas and the published bubble rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import milliseconds

from lightning_pp.schedule import Placement, StageCosts, build_forward_only, build_schedule

PROFILES: dict[str, Any] = json.loads((Path(__file__).parent / "published_profiles.json").read_text())
TOLERANCE = {"1f1b": 0.002, "zb_h1": 0.002}


def profile_id(row: dict[str, Any]) -> str:
    return f"{row['model']}-m{row['microbatches']}"


@pytest.mark.parametrize("row", PROFILES["one_chunk_per_rank"], ids=profile_id)
@pytest.mark.parametrize("name", TOLERANCE)
def test_published_bubbles(row: dict[str, Any], name: str) -> None:
    costs = StageCosts(row["forward_ms"], row["backward_input_ms"], row["backward_weight_ms"], row["p2p_ms"])
    schedule = build_schedule(name, num_ranks=row["stages"], num_microbatches=row["microbatches"], costs=costs)
    bubble = schedule.simulate(costs).longest_span_bubble
    assert bubble == pytest.approx(row["bubble"][name], abs=TOLERANCE[name])


sizes = st.integers(1, 6)
microbatches = st.integers(1, 20)


@given(p=sizes, m=microbatches, f=milliseconds, i=milliseconds, w=milliseconds, c=st.floats(0, 2))
def test_gpipe_makespan(p: int, m: int, f: float, i: float, w: float, c: float) -> None:
    simulation = build_schedule("gpipe", num_ranks=p, num_microbatches=m).simulate(StageCosts(f, i, w, c))
    assert simulation.makespan == pytest.approx((m + p - 1) * (f + i + w) + 2 * (p - 1) * c)
    assert simulation.peak_memory == (m,) * p


@given(p=sizes, m=microbatches, f=milliseconds, i=milliseconds, w=milliseconds)
def test_1f1b_makespan_and_memory(p: int, m: int, f: float, i: float, w: float) -> None:
    simulation = build_schedule("1f1b", num_ranks=p, num_microbatches=m).simulate(StageCosts(f, i, w))
    assert simulation.makespan == pytest.approx((m + p - 1) * (f + i + w))
    assert simulation.peak_memory == tuple(min(m, p - rank) for rank in range(p))


@given(p=sizes, extra=st.integers(0, 10), w=milliseconds, f=milliseconds)
def test_zb_h1_bubble(p: int, extra: int, w: float, f: float) -> None:
    i = max(f, w)  # the formula of the paper holds for W no longer than the other two
    f = max(f, w)
    m = 2 * p + extra
    simulation = build_schedule("zb_h1", num_ranks=p, num_microbatches=m).simulate(StageCosts(f, i, w))
    assert max(simulation.span_ms) == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w))
    assert max(simulation.peak_memory) == p


@given(p=sizes, m=microbatches)
def test_zb_h1_holds_no_more_than_1f1b(p: int, m: int) -> None:
    assert max(build_schedule("zb_h1", num_ranks=p, num_microbatches=m).simulate().peak_memory) <= min(p, m)


@pytest.mark.parametrize("placement", [Placement.interleaved(3), Placement.interleaved(3, 2), Placement.v_shaped(3)])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_forward_only_runs_on_every_placement(placement: Placement, m: int) -> None:
    schedule = build_forward_only(placement, m)
    num_actions = sum(map(len, schedule.programs))
    assert schedule.forward_only
    assert num_actions == placement.num_stages * m
    # No rank is idle once it has begun, apart from the fill of the first and the rest of the last group.
    assert schedule.simulate().makespan <= placement.num_stages // 3 * m + 2 * placement.num_stages
