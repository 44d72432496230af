"""What shows in calls from Python only: looks into tensors (``.numpy()``, ``f"{loss:.3f}"``), fused products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pp.split._torch_private import tree_any, tree_map
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.fakes.recurrent import RECURRENT, at_once

_READS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__format__, Tensor.__dlpack__})
_MAKES_OF_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_GRADIENT_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})
# products with weights inside these are not deferred, for nothing takes the place of the function as a whole
_IN_ONE_PIECE = frozenset(
    {
        *(getattr(torch, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        *(getattr(torch, name) for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")),
        *(torch.einsum, torch.tensordot, torch.inner, torch.bilinear, torch.chain_matmul, torch.linalg.multi_dot),
    }
)


class PythonReads(TorchFunctionMode):
    """Within, Python's reads of a tensor without data get the result of ``read`` for it.

    Args:
        is_missing: Whether a tensor's data are missing.
        read: Returns a real tensor of the same shape.
        address: Where data for a fake lie.
        on_look: Called with a tensor that is read and has its data.
        on_gradient_hook: Told of a tensor that gets a hook on its gradient.
        in_one_piece: Makes a context for functions that multiply by weights in a way that is not deferred.
    """

    def __init__(
        self,
        is_missing: Callable[[Tensor], bool],
        read: Callable[[Tensor], Tensor],
        address: Callable[[Tensor], int],
        on_look: Callable[[Tensor], None] = lambda _: None,
        on_gradient_hook: Callable[[Tensor], None] = lambda _: None,
        in_one_piece: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self._is_missing = is_missing
        self._read = read
        self._address = address
        self._on_look = on_look
        self._on_gradient_hook = on_gradient_hook
        self._in_one_piece = in_one_piece

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        kwargs = kwargs or {}
        if func is Tensor.data_ptr and is_fake(args[0]):
            return self._address(args[0])
        # f"{tensor}" may as well show that it is fake; f"{tensor:.3f}" needs a number
        if func in _READS and isinstance(args[0], Tensor) and (func is not Tensor.__format__ or args[1]):
            if self._is_missing(args[0]):
                return func(self._read(args[0]).detach(), *args[1:], **kwargs)
            self._on_look(args[0])
        if func in _MAKES_OF_DATA and isinstance(args[0], (list, tuple)) and tree_any(self._lacks, args[0]):
            data = tree_map(lambda leaf: self._read(leaf).tolist() if self._lacks(leaf) else leaf, args[0])
            return func(data, *args[1:], **kwargs)
        if func in _GRADIENT_HOOKS and self._lacks(args[0]):
            self._on_gradient_hook(args[0])
        if func in _IN_ONE_PIECE:
            with self._in_one_piece():
                is_layer = func in RECURRENT and tree_any(is_fake, args)
                return at_once(func, args) if is_layer else func(*args, **kwargs)
        return func(*args, **kwargs)

    def _lacks(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and self._is_missing(leaf)
