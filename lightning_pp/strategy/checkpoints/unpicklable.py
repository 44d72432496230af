"""Leaves out states that cannot be pickled, and names them in warnings."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

from torch import Tensor

from lightning_pp.checkpoint.content import CURRENT_MODEL, MODEL, OPTIMIZERS

_LOOKED_INTO = ("callbacks", "lr_schedulers", "loops", MODEL, CURRENT_MODEL, OPTIMIZERS)


class _Pickler(pickle.Pickler):
    """Without tensors: they can be pickled, and may be large."""

    def persistent_id(self, held: Any) -> Any:
        return "tensor" if isinstance(held, Tensor) else None


class Unpicklable:
    """The states that one save leaves out; ``texts`` has a warning for each."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def finds(self, value: Any, what: str, means: str) -> bool:
        """Whether ``value`` cannot be pickled, which is noted."""
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception as error:  # whatever pickling raises
            why = f"{type(error).__name__}: {re.sub(' at 0x[0-9a-f]+', '', str(error))}"  # one text in every save
            self.texts[what] = f"The checkpoint is saved without {what}: it cannot be pickled ({why}). {means}"
        return what in self.texts

    def take_out(self, checkpoint: dict[str, Any], *, is_root: bool) -> None:
        """Takes out states of callbacks. On the root, entries beside model, optimizers and loops are taken out too."""
        means = "After resuming, the callback has its initial state."
        self._drop(checkpoint.get("callbacks", {}), "the state of the callback {!r}", means)
        if is_root:
            means = "After resuming, the scheduler has the value from configure_optimizers."
            for number, state in enumerate(checkpoint.get("lr_schedulers", [])):
                self._drop(state, f"{{!r}} in the state of learning rate scheduler {number}", means)
            self._drop(checkpoint, "{!r}", "Loading the checkpoint does not restore it.")

    def _drop(self, held: dict[str, Any], what: str, means: str) -> None:
        for key in [key for key in held if key not in _LOOKED_INTO]:
            if self.finds(held[key], what.format(key), means):
                del held[key]
