"""Sees that code uses certain tensors, or memory that these share with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pp.sharding._torch_private import shard_itself
from lightning_pp.split._torch_private import hold_memory_number, memory_number


class MemoryGuard(TorchFunctionMode):
    """While it is entered, ``on_use`` is called before a function of torch gets a tensor over watched memory, once.

    Reading an attribute of a tensor (``shape``, ``grad``, ``data``) is no use, nor is setting one to None. Code in
    other threads, compiled code and NumPy arrays over the same memory are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: Callable[[], Iterable[Tensor]] | None = None
        self._numbers: dict[int, object] | None = None  # held, so that no other memory gets one of them meanwhile
        self._on_use: Callable[[], None] = lambda: None
        self._is_entered = False

    def watch(self, tensors: Callable[[], Iterable[Tensor]], on_use: Callable[[], None]) -> None:
        """Enters it for the memory of ``tensors()``, which is called before the first function with a tensor."""
        self._watched, self._numbers, self._on_use = tensors, None, on_use
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leaves it; twice does no harm."""
        self._watched = self._numbers = None
        if self._is_entered:
            self._is_entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Of torch: called in place of each of its functions."""
        kwargs = kwargs or {}
        if self._watched is not None and not _is_of_attribute(func, args) and self._is_used(args, kwargs):
            self._watched = None
            self._on_use()
        return func(*args, **kwargs)

    def _is_used(self, args: Any, kwargs: dict[str, Any]) -> bool:
        for tensor in _tensors_in([*args, *kwargs.values()]):
            if self._numbers is None:
                assert self._watched is not None
                self._numbers = {memory_number(each): hold_memory_number(each) for each in self._watched()}
            local = shard_itself(tensor) if isinstance(tensor, DTensor) else tensor
            if memory_number(local) in self._numbers:
                return True
        return False


def _is_of_attribute(func: Callable[..., Any], args: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__get__" or (name == "__set__" and args[-1] is None)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
