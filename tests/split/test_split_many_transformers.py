"""Architectures of transformers that nobody adapted anything to, cut without hints into stages that run in turn."""

from __future__ import annotations

import pytest
import torch
from model_parts import doubled
from one_process import compare
from transformers_by_config import CASES, MODEL_TYPES, Case, generic


def check(case: Case, runs_again: bool = False) -> None:
    torch.manual_seed(7)
    compare(case.make, [doubled(case.batch(3))], 3, splits_backward=True, runs_again=runs_again)


def test_a_special_one() -> None:
    check(CASES["switch"])


@pytest.mark.nightly
@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_special_ones(name: str, runs_again: bool) -> None:
    check(CASES[name], runs_again)


@pytest.mark.nightly
@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize(
    ("task", "model_type"), [(task, name) for task, names in MODEL_TYPES.items() for name in names]
)
def test_generic_ones(task: str, model_type: str, runs_again: bool) -> None:
    check(generic(task, model_type), runs_again)
