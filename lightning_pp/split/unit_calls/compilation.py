"""Compiled functions in a step that is watched run as they were written, so that their operations can be seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

num_uncompiled = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the block, compiled functions and units run uncompiled; nothing is imported for this."""
    global num_uncompiled
    num_uncompiled += 1
    try:
        with _stance("force_eager"):
            yield
    finally:
        num_uncompiled -= 1


def uncompiled_outside_units() -> AbstractContextManager[Any]:
    """In the block, compiled functions run uncompiled, except in :func:`compiled_again`."""
    return _stance("force_eager")


def compiled_again() -> AbstractContextManager[Any]:
    """Around a unit: compiled functions run compiled, except in :func:`uncompiled`."""
    return nullcontext() if num_uncompiled else _stance("default")


def _stance(stance: str) -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance(stance)
    return context
