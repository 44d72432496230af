"""Random sizes, costs and schedules for the property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from lightning_pp.schedule import Schedule, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.registry import schedule_family

milliseconds = st.floats(min_value=0.1, max_value=10.0).map(lambda value: round(value, 2))


def per_stage(num_stages: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[object]:
    """One number for all stages, or one per stage."""
    return st.one_of(values, st.lists(values, min_size=num_stages, max_size=num_stages))


@st.composite
def stage_costs(draw: st.DrawFn, num_stages: int) -> StageCosts:
    """Uneven costs, with transfers and with memory that shrinks after I."""
    held = draw(st.floats(min_value=0.2, max_value=1.0).map(lambda value: round(value, 2)))
    return StageCosts(
        forward=draw(per_stage(num_stages, milliseconds)),
        backward_input=draw(per_stage(num_stages, milliseconds)),
        backward_weight=draw(per_stage(num_stages, milliseconds)),
        p2p=draw(st.sampled_from([0.0, 0.05, 0.5, 3.0])),
        held_after_input=held,
    )


@st.composite
def built_schedules(draw: st.DrawFn, most_ranks: int = 5) -> tuple[Schedule, StageCosts, dict[str, Any]]:
    """A schedule of any family made by hand, the costs that it was made for, and the request."""
    name = draw(st.sampled_from([name for name in available_schedules() if name != "auto"]))
    family = schedule_family(name)
    request = {
        "num_ranks": draw(st.integers(1, most_ranks)),
        "num_microbatches": draw(st.integers(1, 12)),
        "stages_per_rank": draw(st.sampled_from([v for v in (1, 2, 3) if family.allows(v)])),
    }
    costs = draw(stage_costs(request["num_ranks"] * request["stages_per_rank"]))
    return build_schedule(name, costs=costs, **request), costs, {"name": name, "costs": costs, **request}


@st.composite
def search_requests(draw: st.DrawFn) -> dict[str, Any]:
    """What to ask the search for: small sizes, random costs, and a memory limit that leaves it some microbatches."""
    p, v = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return {
        "num_ranks": p,
        "num_microbatches": draw(st.integers(1, 5)),
        "stages_per_rank": v,
        "costs": draw(stage_costs(p * v)),
        "memory_limit": float(draw(st.integers(2 * v, 2 * v * p + 2))),
    }
