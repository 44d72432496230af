"""The storages that a dry run keeps for backward, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pp.split._torch_private import hold_memory_number, overload_packet, tree_leaves
from lightning_pp.split.record.products import ATEN_OPERANDS
from lightning_pp.split.record.sources import storage_of

_aten = torch.ops.aten
_CASTS = (_aten._to_copy, _aten.to)


class MemoryWatch:
    """Numbers the storages that a step makes, so that each can be counted once.

    Args:
        given: Storages that are there without the step: buffers, and real parameters.
        parameters: The fakes of parameters.
    """

    def __init__(self, given: Iterable[int | None] = (), parameters: Iterable[Tensor] = ()) -> None:
        self._held: list[object] = []
        self._numbers: dict[int, int | None] = {storage: None for storage in given if storage is not None}
        self._next = 0
        self._weights: dict[int, bool] = {}
        self._is_in_one_piece = False
        for parameter in parameters:
            self.note_weight(parameter, parameter.requires_grad)

    def hold(self, tensor: Tensor) -> None:
        """Has no other memory get the number by which that of ``tensor`` is known, also once that is freed."""
        if storage_of(tensor) is not None:
            self._held.append(hold_memory_number(tensor))

    def number(self, tensor: Tensor) -> int | None:
        """The number of the memory of ``tensor``; None if the step did not make it, or it has none."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        if storage not in self._numbers:
            self._numbers[storage] = self._next
            self._next += 1
            self.hold(tensor)
        return self._numbers[storage]

    def unite(self, tensor: Tensor, with_: Tensor) -> int | None:
        """Makes ``tensor``, a copy for the sake of the record, count as the memory of ``with_``."""
        number, storage = self.number(with_), storage_of(tensor)
        if storage is not None:
            self._numbers[storage] = number
            self.hold(tensor)
        return number

    def add(self, tensor: Tensor, to: dict[int, int]) -> None:
        """Adds the memory of ``tensor``, if it counts, to ``to``: number to bytes."""
        number = self.number(tensor)
        if number is not None:
            to[number] = tensor.untyped_storage().nbytes()

    def product(self, func: Any, args: Any, result: Any) -> tuple[Tensor, int] | None:
        """For an operation whose weight gradient can wait: its input, and the bytes of its output's gradient."""
        packet = overload_packet(func)
        if packet in _CASTS and isinstance(args[0], Tensor):
            is_trainable = self.is_weight(args[0])
            if is_trainable is not None:
                self.note_weight(result, is_trainable)
            return None
        places = ATEN_OPERANDS.get(packet)
        if places is None or self._is_in_one_piece or not torch.is_grad_enabled() or not isinstance(result, Tensor):
            return None
        input, weight = (args[place] for place in places)
        return (input, result.nbytes) if self.is_weight(weight) else None

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """In the block, products with weights are not deferred."""
        before, self._is_in_one_piece = self._is_in_one_piece, True
        try:
            yield
        finally:
            self._is_in_one_piece = before

    def note_fake(self, fake: Tensor, real: Tensor) -> None:
        """Notes that ``real``, made-up data, is used instead of ``fake``."""
        is_trainable = self.is_weight(fake)
        if is_trainable is not None and storage_of(real) not in self._numbers:
            self.note_weight(real, is_trainable)

    def is_weight(self, tensor: Tensor) -> bool | None:
        """Whether ``tensor`` lies in a parameter, or in a copy of one in another dtype, and if so whether it learns."""
        storage = storage_of(tensor)
        return None if storage is None else self._weights.get(storage)

    def note_weight(self, tensor: Tensor, is_trainable: bool) -> None:
        """Notes that ``tensor`` is a parameter, or a copy of one in another dtype."""
        storage = storage_of(tensor)
        if storage is not None:
            self._weights[storage] = is_trainable
            self._numbers[storage] = None
            self.hold(tensor)


class GraphReader:
    """Reads off the autograd graph the tensors that the nodes between given places keep, each node once."""

    def __init__(self) -> None:
        self._visited: set[Node] = set()
        self._names: dict[type, list[str]] = {}

    def saved_behind(self, outputs: Iterable[Tensor], stop: Iterable[Node]) -> Iterator[Tensor]:
        """The tensors saved by the nodes on the way back from ``outputs`` to those in ``stop``."""
        stops = set(stop)
        waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._visited or node in stops:
                continue
            self._visited.add(node)
            yield from self._saved_by(node)
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _saved_by(self, node: Node) -> Iterator[Tensor]:
        kind = type(node)
        if kind not in self._names:
            self._names[kind] = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in self._names[kind]:
            try:
                saved = getattr(node, name)
            except RuntimeError:  # in a checkpointed region; or edited in place, an error of the backward to come
                continue
            for leaf in tree_leaves(saved):
                if isinstance(leaf, Tensor):
                    yield leaf
