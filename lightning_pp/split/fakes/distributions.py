"""``torch.distributions`` looks at the values of its arguments, which the stages that do not have them cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from lightning_pp.split._torch_private import replaced_is_all_true
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.sources import sources_of


def distributions_check_what_is_here() -> AbstractContextManager[None]:
    """Within, distributions validate the arguments whose values are real, on the stage that has them."""

    def make(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor | bool]:
        return lambda valid: is_fake(valid) or bool(sources_of(valid)) or original(valid)

    return replaced_is_all_true(make)
