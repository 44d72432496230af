"""Spectral norm: its power iteration runs once for a batch, as on one device, and not in every microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_pp.strategy._torch_private import spectral_norms_of


class PowerIterations:
    """The power iterations of a module's spectral norms, of both of torch's forms.

    Args:
        module: The whole model.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [norm for child in module.modules() for norm in spectral_norms_of(child)]
        self._numbers = [(norm, norm.n_power_iterations) for norm in held]
        self._seen: set[int] = set()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """In the block, as around a batch or its check, nothing iterates but in :meth:`first_of`."""
        self._seen.clear()
        self._set(is_on=False)
        try:
            yield
        finally:
            self._set(is_on=True)

    @contextmanager
    def first_of(self, stage: int) -> Iterator[None]:
        """Around the step of a microbatch: the first on a stage iterates for the whole batch."""
        if not self._numbers or stage in self._seen:
            yield
            return
        self._seen.add(stage)
        self._set(is_on=True)
        try:
            yield
        finally:
            self._set(is_on=False)

    def _set(self, *, is_on: bool) -> None:
        for norm, number in self._numbers:
            norm.n_power_iterations = number if is_on else 0
