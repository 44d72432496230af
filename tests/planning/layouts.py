"""A layout of one recording, whole blocks only."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pp.planning.tuning import Layout, LayoutRequest, best_layout, choose_cuts, layout_of
from lightning_pp.split.record.step_record import StepRecord


def choose_layout(record: StepRecord, num_parameters: Mapping[str, int], request: LayoutRequest) -> Layout:
    return best_layout(
        lambda on: layout_of(record, choose_cuts(record, num_parameters, request, on), request, on), request
    )
