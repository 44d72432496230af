"""The private names of torch that splitting uses; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_pp._private_names import private, reader_of, uses

LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch reports operations on fakes that fail."""

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
    from torch.utils._pytree import arg_tree_leaves, tree_any, tree_flatten, tree_leaves, tree_map, tree_unflatten
else:
    OpOverload = private("torch._ops.OpOverload")
    FakeTensor, FakeTensorMode = (
        private(f"torch._subclasses.fake_tensor.{name}") for name in ("FakeTensor", "FakeTensorMode")
    )
    pytree = private("torch.utils._pytree")
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")
    without_dispatch_modes = private("torch.utils._python_dispatch._disable_current_modes")
    arg_tree_leaves, tree_any, tree_flatten, tree_leaves, tree_map, tree_unflatten = (
        private(f"torch.utils._pytree.{name}")
        for name in ("arg_tree_leaves", "tree_any", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten")
    )

# what is imported above, and taken from here
__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "arg_tree_leaves",
    "pytree",
    "tree_any",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_dispatch_modes",
]

# what operations on fakes raise that depend on data, or that know no fakes
NOT_FAKEABLE: tuple[type[Exception], ...] = tuple(
    private(f"torch._subclasses.fake_tensor.{name}")
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
)

# what is called in place of a module's whole ``__call__`` where it is among the module's own attributes
COMPILED_CALL = "_compiled_call_impl"

# ``torch.nn.functional.grouped_mm`` calls it, and older code by this name
GROUPED_PRODUCT = "_grouped_mm"

# where modules keep what they hold
PARAMETERS, BUFFERS = "_parameters", "_buffers"
# where modules keep what they hold besides buffers, and recurrent layers their parameters once more
HELD_BY_MODULES = frozenset({"_parameters", "_modules", "_non_persistent_buffers_set"})
HELD_BY_RECURRENT_LAYERS = frozenset({"_flat_weights", "_flat_weight_refs"})

# of :mod:`torch.utils.checkpoint`; torch 2.15 has the second; both take the function first
_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
CHECKPOINT_GENERATORS = [name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name)]

is_functorch_wrapped: Callable[[Tensor], bool] = private("torch._C._functorch.is_functorch_wrapped_tensor")
# whether a tensor is made of others, as those are that FSDP keeps sharded
is_made_of_others: Callable[[Tensor], bool] = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
# a tensor of a subclass without memory of its own, of a shape, dtype and device
make_wrapper: Callable[..., Any] = private("torch.Tensor._make_wrapper_subclass")
# the function mode on top; None where there is none
current_function_mode: Callable[[], Any] = private("torch.overrides._get_current_function_mode")
# a context in which that mode is off
without_current_function_mode: Callable[[], AbstractContextManager[Any]] = private(
    "torch.overrides._pop_mode_temporarily"
)
# one in which all function modes are
without_function_modes: Callable[[], AbstractContextManager[Any]] = private("torch._C.DisableTorchFunction")
_dispatch_keys: Any = private("torch._C._dispatch_keys")
_DEVICE = torch.ops.prim.device.default
_are_forward_derivatives_on: Callable[[], bool] = private("torch._C._is_fwd_grad_enabled")

# The dicts in which a module keeps what it holds itself: parameters, buffers, and hooks around its forward.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = reader_of("torch.nn.Module._parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = reader_of("torch.nn.Module._buffers")
forward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = reader_of("torch.nn.Module._forward_pre_hooks")
forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = reader_of("torch.nn.Module._forward_hooks")
# what ``module(...)`` runs where it is not compiled: the hooks and ``forward``
call_of: Callable[[nn.Module], Callable[..., Any]] = reader_of("torch.nn.Module._call_impl")
# how often a tensor, or what shares its memory, has been written into
version_of: Callable[[Tensor], int] = reader_of("torch.Tensor._version")
# name and arguments of an operation, with what it writes into
schema_of: Callable[[Any], Any] = reader_of("torch._ops.OpOverload._schema")
# the operation of all overloads that an operation is one of
overload_packet: Callable[[Any], Any] = reader_of("torch._ops.OpOverload._overloadpacket")


def running_autograd_function() -> bool:
    """Whether the ``forward`` of a :class:`torch.autograd.Function` runs: derivatives of either mode are off there."""
    return not (torch.is_grad_enabled() or _are_forward_derivatives_on() or torch.is_inference_mode_enabled())


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether ``module`` has hooks before or after its forward."""
    return bool(forward_pre_hooks_of(module) or forward_hooks_of(module))


@uses("torch.nn.Module._forward_pre_hooks_with_kwargs", "torch.nn.Module._forward_hooks_with_kwargs")
def wants_keywords(module: nn.Module, key: int, *, before: bool) -> bool:
    """Whether the hook ``key`` before or after the forward of ``module`` is shown keyword arguments."""
    return key in (module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs)


@uses("torch.UntypedStorage._cdata")
def memory_number(tensor: Tensor) -> int:
    """A number that tensors over the same memory share, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


_StorageWeakRef: Any = private("torch.multiprocessing.reductions.StorageWeakRef")


def hold_memory_number(tensor: Tensor) -> object:
    """While the result lives, no other memory gets the :func:`memory_number` of ``tensor``; its data may be freed."""
    return _StorageWeakRef(tensor.untyped_storage())


def dispatch_keys_of(tensor: Tensor) -> int:
    """The kinds of dispatch that ``tensor`` takes part in, as bits."""
    return int(_dispatch_keys(tensor).raw_repr())


class OpaqueOperation:
    """An operator that takes functions (FlexAttention), as an operation that writes into nothing and draws nothing."""

    tags = ()
    _schema = SimpleNamespace(name="higher_order", arguments=(), is_mutable=False)

    def __init__(self, operator: Any) -> None:
        self._overloadpacket = self._operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        return self._operator(*args, **kwargs)


class OperationsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation, those that take functions as :class:`OpaqueOperation`."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # torch asks for it several times in each operation
            return args[0].fake_device
        if any(kind.__module__.startswith("torchao.") for kind in types):  # what such tensors are made of comes by here
            return NotImplemented
        return self.run(func if isinstance(func, OpOverload) else OpaqueOperation(func), args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation."""
        raise NotImplementedError


@uses("torch._is_all_true")
@contextmanager
def distributions_check_what_is_here(is_missing: Callable[[Tensor], bool]) -> Iterator[None]:
    """In the block, :mod:`torch.distributions` validate those of their arguments whose values are not missing."""
    original = torch._is_all_true

    def is_all_true(valid: Tensor) -> Any:
        return is_missing(valid) or original(valid)

    torch._is_all_true = is_all_true  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._is_all_true = original


@uses("torch.nn.Module._apply")
@contextmanager
def replaced_module_apply(apply: Callable[..., nn.Module]) -> Iterator[None]:
    """In the block, ``Module.to`` and the like call ``apply(original, module, function)`` for each module by itself."""
    original: Any = nn.Module._apply

    def replaced(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]
        return apply(original, module, function)

    nn.Module._apply = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
