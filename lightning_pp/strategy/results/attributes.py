"""What the user's step keeps on the module: the same after a batch as on one device, on every rank.

``self.validation_step_outputs.append(preds)``, ``self.num_seen += 1`` and the like run once per microbatch, and to
their end on the last stage only. Each microbatch starts from what the module held before the batch; the changes are
merged as outputs are, so a list grows by the batch's entry, a running mean moves by the batch's mean, a counter counts
one; and the last stage's result is given to every rank, since hooks that read it run on all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pp.strategy.results.outputs import merge_outputs

_LIGHTNINGS_OWN = frozenset(vars(pl.LightningModule()))
_MISSING = object()


def kept_by_step(
    module: nn.Module, mutated: Sequence[tuple[str, str]], units: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Of the ``(module name, attribute)`` that a dry run saw change, those that this module looks after.

    Metrics look after themselves, and what lies inside a unit belongs to its stage.
    """
    prefixes = tuple(unit + "." for unit in units)
    return tuple(
        (name, attribute)
        for name, attribute in mutated
        if attribute not in _LIGHTNINGS_OWN
        and name not in units
        and not name.startswith(prefixes)
        and not isinstance(module.get_submodule(name), Metric)
    )


class StepAttributes:
    """The attributes that one batch's steps change.

    Args:
        module: The user's module.
        names: Module names and attributes, as :func:`kept_by_step` gives them.

    Attributes:
        names: Of the attributes, dotted.
    """

    def __init__(self, module: nn.Module, names: Sequence[tuple[str, str]]) -> None:
        self.names = [f"{name}.{attribute}" if name else attribute for name, attribute in names]
        self._places = [(module.get_submodule(name).__dict__, attribute) for name, attribute in names]
        self._before = [_Snapshot(attributes.get(key, _MISSING)) for attributes, key in self._places]
        self._changes: dict[int, list[Any]] = {}

    @property
    def are_kept(self) -> bool:
        """Whether there are any."""
        return bool(self._places)

    @contextmanager
    def of_microbatch(
        self, microbatch: int, of_whole_batch: Callable[[Any], Any] | None = None, *, active: bool
    ) -> Iterator[None]:
        """Around one microbatch's step; its changes are noted if ``active`` and undone in any case.

        Args:
            microbatch: Its index.
            of_whole_batch: Makes values stand for the whole batch.
            active: Whether the changes count.
        """
        try:
            yield
            if active and self._places:
                self._changes[microbatch] = [
                    before.change(attributes.get(key, _MISSING), of_whole_batch)
                    for before, (attributes, key) in zip(self._before, self._places, strict=True)
                ]
        finally:
            for before, (attributes, key) in zip(self._before, self._places, strict=True):
                before.restore(attributes, key)

    def merged(self, num_samples: Sequence[int], weights: Sequence[float]) -> list[Any]:
        """The batch's changes, from the microbatches'."""
        if not self._changes:
            return []
        per_attribute = zip(*(self._changes[index] for index in sorted(self._changes)), strict=True)
        return [_merge(list(changes), num_samples, weights) for changes in per_attribute]

    def apply(self, changes: Sequence[Any]) -> None:
        """Makes ``changes``, the last stage's, on this rank."""
        for change, before, (attributes, key) in zip(changes, self._before, self._places, strict=False):
            before.apply(change, attributes, key)


class _Snapshot:
    """One attribute before the batch."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.content = copy.copy(value) if isinstance(value, (list, dict, set)) else None

    def change(self, now: Any, of_whole_batch: Callable[[Any], Any] | None = None) -> tuple[str, Any]:
        """What happened: append (entries), set keys (items), set (the value), delete or keep (None)."""
        kind, value = self._change(now)
        return kind, value if of_whole_batch is None else of_whole_batch(value)

    def _change(self, now: Any) -> tuple[str, Any]:
        if now is _MISSING:
            return ("keep" if self.value is _MISSING else "delete", None)
        if isinstance(now, list) and now is self.value and len(now) >= len(self.content or ()):
            kept = zip(now, self.content or (), strict=False)
            if all(mine is theirs for mine, theirs in kept):
                return ("append", now[len(self.content or ()) :])
        before: Any = self.content or {}
        if isinstance(now, dict) and now is self.value and not before.keys() - now.keys():
            return ("set keys", {key: item for key, item in now.items() if before.get(key, _MISSING) is not item})
        if now is self.value and not isinstance(now, (list, dict, set)):
            return ("keep", None)
        return ("set", copy.copy(now) if isinstance(now, (list, dict, set)) else now)

    def restore(self, attributes: dict[str, Any], key: str) -> None:
        if self.value is _MISSING:
            attributes.pop(key, None)
            return
        if isinstance(self.value, list):
            self.value[:] = self.content or []
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self.content or ())
        attributes[key] = self.value

    def apply(self, change: tuple[str, Any], attributes: dict[str, Any], key: str) -> None:
        kind, value = change
        if kind == "keep":
            return
        if kind == "delete":
            attributes.pop(key, None)
        elif kind == "append":
            self.value.extend(value)
        elif kind == "set keys":
            self.value.update(value)
        elif isinstance(value, list) and isinstance(self.value, list):
            self.value[:] = value
        else:
            attributes[key] = value


def _merge(changes: list[tuple[str, Any]], num_samples: Sequence[int], weights: Sequence[float]) -> tuple[str, Any]:
    kinds = {kind for kind, _ in changes}
    if len(kinds) > 1:
        return changes[-1]
    kind = changes[0][0]
    values = [value for _, value in changes]
    if kind == "append" and len({len(entries) for entries in values}) == 1:
        # entry by entry: each microbatch appended its part of what the batch appends
        return (kind, [merge_outputs(list(parts), num_samples, weights) for parts in zip(*values, strict=True)])
    if kind == "append":
        return (kind, [entry for entries in values for entry in entries])
    if kind in ("keep", "delete"):
        return (kind, None)
    if _all_equal(values):  # a value that the samples do not change, a cache, has no row per sample
        return (kind, values[0])
    return (kind, merge_outputs(values, num_samples, weights))


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(
            isinstance(value, Tensor) and value.dtype == first.dtype and torch.equal(value, first)
            for value in values[1:]
        )
    try:
        return all(type(value) is type(first) and bool(value == first) for value in values[1:])
    except (RuntimeError, ValueError):  # containers of tensors have no one truth value
        return False
