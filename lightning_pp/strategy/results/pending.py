"""The loss and the outputs of a batch that the last stage may still be at work on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# what Lightning does with a loss, and a callback that keeps one
_WITHOUT_LOOKING = frozenset({"detach", "clone", "div", "true_divide", "__truediv__", "mul", "__mul__", "__rmul__"})


class PendingLoss(Tensor):
    """A tensor whose value is waited for when somebody looks at it or computes with it.

    ``detach``, ``clone`` and multiplying or dividing by a number give another pending loss; anything else, printing
    and reading the shape included, waits for the value and is done with it.

    Args:
        compute: Waits for the value; called once.
    """

    _compute: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor]) -> PendingLoss:
        pending: PendingLoss = torch.Tensor._make_wrapper_subclass(cls, (), device=torch.device("cpu"))
        pending._compute = compute
        pending._value = None
        return pending

    def value(self) -> Tensor:
        """The tensor itself; waits for it."""
        if self._value is None:
            self._value = self._compute()
            del self._compute
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        pending = args[0] if args else None
        if (
            isinstance(pending, PendingLoss)
            and pending._value is None
            and getattr(func, "__name__", "") in _WITHOUT_LOOKING
            and all(isinstance(arg, (int, float)) for arg in args[1:])
            and not kwargs
        ):
            return PendingLoss(lambda: func(pending.value(), *args[1:]))
        return func(*tree_map(_value_of, args), **tree_map(_value_of, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(_value_of, args), **tree_map(_value_of, kwargs or {}))


def _value_of(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, PendingLoss) else leaf


class PendingOutputs(dict[str, Any]):
    """What Lightning hands to ``on_train_batch_end``, waited for when somebody looks at more than ``["loss"]``."""

    _rest: Callable[[], Mapping[str, Any]] | None = None

    @classmethod
    def awaiting(cls, loss: Tensor, rest: Callable[[], Mapping[str, Any]]) -> PendingOutputs:
        """Outputs with a loss that is known to come.

        Args:
            loss: The loss.
            rest: Waits for the other outputs; called at most once.
        """
        outputs = cls()
        dict.__setitem__(outputs, "loss", loss)
        outputs._rest = rest
        return outputs

    def with_loss(self, loss: Tensor) -> PendingOutputs:
        """The same with another loss."""
        return self.awaiting(loss, lambda: {key: value for key, value in self.items() if key != "loss"})

    def _settle(self) -> None:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            dict.__setitem__(self, "loss", _value_of(dict.__getitem__(self, "loss")))
            dict.update(self, rest())

    def __getitem__(self, key: str) -> Any:
        if key != "loss":
            self._settle()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if key != "loss":
            self._settle()
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        return self[key] if key in self else default  # noqa: SIM401


def _settled_first(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def settle_first(self: PendingOutputs, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return method(self, *args, **kwargs)

    return settle_first


for _name in (
    *("__iter__", "__len__", "__reversed__", "__repr__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__"),
    *("__setitem__", "__delitem__", "clear", "copy", "items", "keys", "pop", "popitem", "setdefault", "update"),
    "values",
):
    setattr(PendingOutputs, _name, _settled_first(_name))


def _plain(self: PendingOutputs, protocol: Any) -> Any:
    return dict, (dict(self),)


setattr(PendingOutputs, "__reduce_ex__", _plain)  # noqa: B010 # a copy or a pickle is an ordinary dict
