"""Calling the user's step outside of a loop, to learn from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl


@contextmanager
def logging_to(module: pl.LightningModule, sink: Callable[[Any], None]) -> Iterator[None]:
    """Within, ``module.log`` only tells ``sink`` what it is given; no loop needs to be running."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        sink(value)

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        sink(dict(dictionary))

    replaced = {"log": log, "log_dict": log_dict}
    module.__dict__.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            module.__dict__.pop(name, None)


def first_arguments(module: pl.LightningModule, step: str) -> list[Any]:
    """What follows the batch in the step's first call."""
    parameters = inspect.signature(getattr(module, step)).parameters
    takes_index = "batch_idx" in parameters or len(parameters) > 1
    return [0] if takes_index else []
