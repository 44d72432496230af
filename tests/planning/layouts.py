"""A recording of a module's training step, and a layout of one, whole blocks only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, record_model
from lightning_pp.planning.tuning import Layout, LayoutRequest, best_layout, choose_cuts, layout_of
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
