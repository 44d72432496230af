"""What Lightning's own ``self.log`` would raise, after a run of a step in which nothing is logged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric

from lightning_pp.strategy._lightning_private import logging_from, results_of
from lightning_pp.strategy.lightning.patching import replaced


class LoggedCalls:
    """The arguments of ``self.log`` in one run of a step, to be looked at where the step is refused otherwise.

    Args:
        module: The user's module.
        step: Name of its step.
    """

    def __init__(self, module: pl.LightningModule, step: str) -> None:
        self._module = module
        self._step = step
        self.noted: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Takes note of a call; of what is no metric only that it is a number."""
        self.noted.append((name, value if isinstance(value, Metric) else 0.0, args, options))

    def check(self) -> None:
        """Calls Lightning's ``log`` with what was noted; nothing is stored.

        A ``log`` of the module's own is left alone: it may change what it hands on.

        Raises:
            MisconfigurationException: As Lightning raises it.
        """
        module = self._module
        results = results_of(module)
        if results is None or type(module).log is not pl.LightningModule.log:
            return
        with logging_from(module, self._step), replaced(results, log=_nothing, reset=_nothing):
            for name, value, args, options in self.noted:
                pl.LightningModule.log(module, name, value, *args, **options)


def _nothing(*args: Any, **options: Any) -> None:
    pass
