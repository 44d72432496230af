"""Random sizes, costs and schedules for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_pp.schedule import StageCosts

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
