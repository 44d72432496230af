"""``torch.distributions`` looks at the values of its arguments, which the stages that do not have them cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.sources import sources_of


@contextmanager
def distributions_check_what_is_here() -> Iterator[None]:
    """Within, distributions validate the arguments whose values are real, on the stage that has them."""
    original = torch._is_all_true

    def is_all_true(valid: Tensor) -> Tensor | bool:
        return is_fake(valid) or bool(sources_of(valid)) or original(valid)

    torch._is_all_true = is_all_true  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._is_all_true = original
