"""Values of metrics on a whole batch, from their states in its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pp.runtime._torch_private import view_base
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.strategy._lightning_private import forget_computed, reductions_of


@dataclass(frozen=True)
class _Computed:
    """A value that a metric computed in the step of one microbatch.

    Attributes:
        metric: The metric.
        value: What it computed.
        compute: Computes the value of the states that the metric has then.
        states: Those of the microbatch alone, by name; None: the value was of everything so far.
    """

    metric: Metric
    value: Any
    compute: Callable[[], Any]
    states: Mapping[str, Any] | None


_Part = tuple[Any, ...]
"""Shape, strides and offset of a view."""


class BatchValues:
    """The values that metrics computed in the steps of one batch.

    ``value = self.metric(preds, target)`` has its value on the microbatch. The value on the batch is computed from the
    states of all microbatches, reduced as torchmetrics reduces those of several processes.
    """

    def __init__(self) -> None:
        # by the identity of a tensor in a value: which value it is of, and where it stands there
        self._found: dict[int, tuple[_Computed, int]] = {}

    def add(self, metric: Metric, value: Any, compute: Callable[[], Any], *, on_batch: bool) -> None:
        """Notes what ``compute`` has just given.

        Args:
            metric: Whose value it is. One that wraps others has no states of its own, and is not noted.
            value: The value.
            compute: Computes it without a sync.
            on_batch: Whether the metric has the states of the microbatch alone, and not of everything so far.
        """
        names = reductions_of(metric)
        if not names or any(isinstance(part, Metric) for part in metric.children()):
            return
        states = {name: _kept(getattr(metric, name)) for name in names} if on_batch else None
        computed = _Computed(metric, value, compute, states)
        for place, leaf in enumerate(leaves_of(value)):
            if isinstance(leaf, Tensor):
                self._found[id(leaf)] = (computed, place)

    def value_of(self, logged: Sequence[Any]) -> Tensor | None:
        """The value on the batch of what its microbatches logged; None: a metric did not compute it, or only one did.

        Args:
            logged: What the microbatches logged, in their order.
        """
        found = [self._find(each) for each in logged]
        each = [item for item in found if item is not None]
        if len(each) < max(2, len(found)) or len({(id(computed.metric), *where) for computed, *where in each}) > 1:
            return None
        last, place, part = each[-1]
        states = [computed.states for computed, *_ in each]
        if any(state is None for state in states):
            value = last.value
        else:
            with torch.no_grad(), _reduced(last.metric, [state for state in states if state is not None]):
                value = last.compute()
        leaf = list(leaves_of(value))[place]
        if not isinstance(leaf, Tensor):
            return None
        return leaf.detach() if part is None else leaf.detach().contiguous().as_strided(*part)

    def _find(self, logged: Any) -> tuple[_Computed, int, _Part | None] | None:
        """Whose value ``logged`` is, where it stands there, and which part of that tensor it is (``value[1]``)."""
        base = view_base(logged) if isinstance(logged, Tensor) else None
        whole, part = self._found.get(id(logged)), None
        if whole is None and base is not None and base.is_contiguous():
            whole, part = self._found.get(id(base)), (logged.shape, logged.stride(), logged.storage_offset())
        return None if whole is None else (*whole, part)


@contextmanager
def _reduced(metric: Metric, states: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """In the block, ``metric`` has ``states`` in one."""
    reductions = reductions_of(metric)
    own = {name: getattr(metric, name) for name in reductions}
    try:
        for name, reduce in reductions.items():
            each = [state[name] for state in states]
            lists = all(isinstance(state, list) for state in each)
            joined: Any = [part for state in each for part in state] if lists else torch.stack(each)
            setattr(metric, name, joined if reduce is None or (lists and not joined) else reduce(joined))
        yield
    finally:
        forget_computed(metric)
        for name, state in own.items():
            setattr(metric, name, state)


def _kept(state: Any) -> Any:
    """A state as it is now, without its graph."""
    return [part.detach() for part in state] if isinstance(state, list) else state.detach()
