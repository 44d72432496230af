"""A function runs another for a while, wherever it was imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from lightning_pp.strategy.lightning.patching import redirected


def halved(number: float, by: float = 2.0) -> float:
    return number / by


def one_more(original: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    return original(*args, **kwargs) + 1


def test_every_reference_runs_the_other() -> None:
    kept = {"function": halved}
    with redirected(halved, one_more):
        assert kept["function"](8.0) == halved(8.0) == 5
        assert halved(8.0, by=4.0) == 3
        with redirected(halved, one_more):
            assert halved(8.0) == 6
        assert halved(8.0) == 5
    assert halved(8.0) == 4
    assert not [name for name in globals() if name.startswith("_redirected")]
    assert str(inspect.signature(halved)) == "(number: 'float', by: 'float' = 2.0) -> 'float'"


def test_a_decorator_around_it_stays() -> None:
    """Torch's function runs without gradients."""
    seen = []
    with redirected(clip_grad_norm_, lambda *_, **__: seen.append(torch.is_grad_enabled())):
        clip_grad_norm_([], 1.0)
    assert seen == [False]


def test_an_error_in_the_block_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), redirected(halved, lambda original, number: number / 0):
        halved(1.0)
    assert halved(1.0) == 0.5
