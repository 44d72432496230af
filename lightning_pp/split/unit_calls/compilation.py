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
    """Within, what is compiled runs uncompiled, units too; nothing is imported for it."""
    global num_uncompiled
    num_uncompiled += 1
    try:
        with _stance("force_eager"):
            yield
    finally:
        num_uncompiled -= 1


def uncompiled_outside_units() -> AbstractContextManager[Any]:
    """Within, what is compiled runs uncompiled, except in :func:`compiled_again`."""
    return _stance("force_eager")


def compiled_again() -> AbstractContextManager[Any]:
    """Around a unit: what is compiled runs so, unless :func:`uncompiled` says otherwise."""
    return nullcontext() if num_uncompiled else _stance("default")


def _stance(stance: str) -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance(stance)
    return context
