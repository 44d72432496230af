"""A recording of a module's training step, and a layout of one, whole blocks only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, SplitModel, assign_stages, record_model
from lightning_pp.planning.tuning import Layout, LayoutRequest, best_layout, choose_cuts, layout_of
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import partition_units
from lightning_pp.split.record.step_record import StepRecord


def choose_layout(record: StepRecord, num_parameters: Mapping[str, int], request: LayoutRequest) -> Layout:
    return best_layout(
        lambda on: layout_of(record, choose_cuts(record, num_parameters, request, on), request, on), request
    )


def recorded_training(
    module: Any,
    batch: torch.Tensor,
    how: RecordingOptions | None = None,
    like: RecordedModel | None = None,
    num_stages: int = 2,
) -> RecordedModel:
    return record_model(
        module,
        device=torch.device("cpu"),
        step=lambda run: module.training_step(run.own(batch)),
        with_gradients=True,
        patterns=None,
        num_stages=num_stages,
        how=how or RecordingOptions(),
        like=like,
    )


def split_model(recording: RecordedModel, num_stages: int, split_points: Sequence[str] | None = None) -> SplitModel:
    """One stage on each rank, balanced or cut at ``split_points``."""
    placement = Placement.interleaved(num_stages)
    partition = partition_units(
        recording.record, placement=placement, num_parameters=recording.num_parameters, split_points=split_points
    )
    return assign_stages(recording, placement=placement, partition=partition)
