"""The bytes of tensors that are alive, by watching every operation: what a CPU's allocator does not tell."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_pp.doctor._torch_private import StorageReference, TorchDispatchMode, leaves_of


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, the memory that operations make is counted until nothing refers to it any more.

    Attributes:
        peak_bytes: The most that there was at one time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._known: dict[int, StorageReference] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)}
        made = False
        for leaf in leaves_of(result):
            if type(leaf) is Tensor and _address(leaf) and _address(leaf) not in given:
                self._known[_address(leaf)] = StorageReference(leaf.untyped_storage())
                made = True
        if made:
            self.peak_bytes = max(self.peak_bytes, self._live_bytes())
        return result

    def _live_bytes(self) -> int:
        total = 0
        for address, reference in list(self._known.items()):
            if reference.has_gone():
                del self._known[address]
            else:
                total += reference.num_bytes
        return total


def _address(tensor: Tensor) -> int:
    """Of its memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
