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

PROFILES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "published_profiles.json").read_text())
# Layers of each model when padded so that every chunk of interleaved_1f1b has the same number, at least one.
PADDED_LAYERS = {"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64}


def profile_id(row: dict[str, Any]) -> str:
    return f"{row.get('model', 'V')}-p{row.get('stages', row.get('ranks'))}-m{row['microbatches']}"


def chunk_costs(row: dict[str, Any], factor: float) -> StageCosts:
    times = (factor * row[key] for key in ("forward_ms", "backward_input_ms", "backward_weight_ms"))
    return StageCosts(*times, p2p=row["p2p_ms"])


@pytest.mark.parametrize(
    "row", [*PROFILES["one_chunk_per_rank"], *PROFILES["two_chunks_per_rank"]["rows"]], ids=profile_id
)
@pytest.mark.parametrize(
    ("name", "tolerance"), [("1f1b", 0.002), ("zb_h1", 0.002), ("zb_h2", 0.002), ("interleaved_1f1b", 0.005)]
)
def test_published_bubbles(row: dict[str, Any], name: str, tolerance: float) -> None:
    has_two_chunks = "ranks" in row
    num_ranks, stages_per_rank = row["ranks" if has_two_chunks else "stages"], 1
    if name == "interleaved_1f1b":
        stages_per_rank = 2 if has_two_chunks else PADDED_LAYERS[row["model"]] // num_ranks
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_microbatches=row["microbatches"], stages_per_rank=stages_per_rank
    )
    bubble = schedule.simulate(chunk_costs(row, (1 + has_two_chunks) / stages_per_rank)).bubble_fraction
    assert bubble == pytest.approx(row["bubble"][name], abs=tolerance)


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


@given(p=sizes, extra=st.integers(0, 10), t=milliseconds)
def test_zb_h2_and_zb_v_have_no_bubble_when_all_is_equal(p: int, extra: int, t: float) -> None:
    for name, peak in (("zb_h2", 2 * p - 1), ("zb_v", 2 * p)):
        simulation = build_schedule(name, num_ranks=p, num_microbatches=2 * p + extra).simulate(StageCosts(t, t, t))
        assert simulation.bubble_fraction == pytest.approx(0, abs=1e-9)
        assert max(simulation.peak_memory) <= peak


@given(p=st.integers(2, 6), groups=st.integers(1, 4), v=st.integers(2, 4), t=milliseconds)
def test_interleaved_1f1b_divides_the_bubble_by_its_chunks(p: int, groups: int, v: int, t: float) -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=p, num_microbatches=groups * p, stages_per_rank=v)
    simulation = schedule.simulate(StageCosts(t, t, t))
    assert simulation.makespan == pytest.approx((v * groups * p + p - 1) * 3 * t)


@given(p=sizes, m=st.integers(1, 30))
def test_dualpipe_v_memory(p: int, m: int) -> None:
    schedule = build_schedule("dualpipe_v", num_ranks=p, num_microbatches=m)
    assert max(schedule.simulate().peak_memory) <= 2 * p + 1
