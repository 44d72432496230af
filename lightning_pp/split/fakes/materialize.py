"""Allocates and initialises parameters and buffers that were made on the meta device."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split._torch_private import buffers_of, parameters_of, version_of

_Initializer = Callable[[nn.Module], Any]


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves every buffer to ``device``, since the step computes with them everywhere; meta ones are made anew.

    Raises:
        ConfigurationError: Nothing fills a buffer.
    """
    fresh: dict[str, Tensor] = {}
    for name, child in module.named_modules():
        for key, buffer in buffers_of(child).items():
            if buffer is None:
                continue
            if buffer.is_meta:
                buffers_of(child)[key] = fresh[_join(name, key)] = _unfilled(buffer, device)
            elif buffer.device != device:
                buffers_of(child)[key] = buffer.to(device)
    _fill(module, fresh)


def materialize_parameters(module: nn.Module, owned: Collection[str], device: torch.device) -> None:
    """Allocates the parameters in ``owned`` that are on the meta device, and fills them as their modules say.

    The ``_init_weights`` of the Hugging Face model around a module says it, or else its own ``reset_parameters()``;
    what is around is asked after what is inside, as when a model is made. What a module draws depends on the seed and
    its name, not on the stage that it is on.

    Args:
        module: The whole model; parameters that are not owned are gone from it.
        owned: Names of this rank's parameters.
        device: Where to put them.

    Raises:
        ConfigurationError: Nothing fills a parameter.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    fresh: dict[str, Tensor] = {}
    for name, child in module.named_modules():
        for key, parameter in parameters_of(child).items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in replaced:
                if _join(name, key) not in owned:
                    continue
                new = nn.Parameter(_unfilled(parameter, device), requires_grad=parameter.requires_grad)
                replaced[parameter] = fresh[_join(name, key)] = new
            parameters_of(child)[key] = replaced[parameter]
    _fill(module, fresh)


@contextmanager
def without_parameters(module: nn.Module, hidden: Collection[nn.Parameter]) -> Iterator[None]:
    """In the block, ``module.to(...)`` and the like do not see the parameters ``hidden``."""
    places = [
        (child, key)
        for child in module.modules()
        for key, parameter in parameters_of(child).items()
        if parameter in hidden
    ]
    held = [parameters_of(child)[key] for child, key in places]
    for child, key in places:
        parameters_of(child)[key] = None
    try:
        yield
    finally:
        for (child, key), parameter in zip(places, held, strict=True):
            setattr(child, key, parameter)  # recurrent layers keep lists of their own


def _fill(root: nn.Module, fresh: dict[str, Tensor]) -> None:
    """Runs the initialisers of all modules with something fresh in them, and nothing else is changed.

    Raises:
        ConfigurationError: Something fresh has been left as it was.
    """
    if not fresh:
        return
    seed = torch.initial_seed()
    tensors = set(fresh.values())
    versions = {name: version_of(tensor) for name, tensor in fresh.items()}
    devices = list({tensor.device for tensor in tensors if tensor.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices=devices), _only_changing(root, tensors):
        _initialize("", root, None, tensors, seed)
        for name, tensor in fresh.items():
            current = _current(root, name)
            if current is tensor and _is_unfilled(tensor, changed=version_of(tensor) != versions[name]):
                _refuse(root, name)


def _initialize(
    name: str, module: nn.Module, around: _Initializer | None, fresh: Collection[Tensor], seed: int
) -> bool:
    """Runs the initialisers of ``module`` and of what is inside, first; whether there was anything fresh to fill."""
    own = getattr(module, "_init_weights", None)
    around = own if callable(own) and _takes_a_module(own) else around
    direct = [held for _, held in _held_by(module) if held in fresh]
    inside = [_initialize(_join(name, key), child, around, fresh, seed) for key, child in module.named_children()]
    if not direct and not any(inside):
        return False
    for initializer in _find_initializers(module, around):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
        initializer(module)
        if not any(map(_is_unfilled, direct)):
            break
    return True


def _find_initializers(module: nn.Module, around: _Initializer | None) -> list[_Initializer]:
    """What may fill ``module``, the likeliest first."""
    found: list[_Initializer] = [] if around is None else [around]
    for name in ("reset_parameters", "_reset_parameters", "_init_weights"):
        method = getattr(module, name, None)
        if callable(method) and not _takes_a_module(method):
            found.append(lambda _, method=method: method())  # type: ignore[misc]
    return found


def _takes_a_module(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


@contextmanager
def _only_changing(root: nn.Module, fresh: Collection[Tensor]) -> Iterator[None]:
    """In the block, initialisers reach copies of everything that is not fresh: without memory for parameters."""
    saved = [
        (module, key, tensor)
        for module in root.modules()
        for key, tensor in _held_by(module)
        if tensor not in fresh and not tensor.is_meta
    ]
    for module, key, tensor in saved:
        if key in parameters_of(module):
            copy = torch.empty_like(tensor, device="meta")
            parameters_of(module)[key] = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        else:
            buffers_of(module)[key] = tensor.clone()
    try:
        yield
    finally:
        for module, key, tensor in saved:
            if isinstance(tensor, nn.Parameter):
                parameters_of(module)[key] = tensor
            else:
                buffers_of(module)[key] = tensor


def _held_by(module: nn.Module) -> list[tuple[str, Tensor]]:
    held: list[tuple[str, Tensor | None]] = [*parameters_of(module).items(), *buffers_of(module).items()]
    return [(key, tensor) for key, tensor in held if tensor is not None]


def _unfilled(like: Tensor, device: torch.device) -> Tensor:
    """Memory whose content shows whether anybody has written into it."""
    new = torch.empty_like(like, device=device)
    if like.is_floating_point() or like.is_complex():
        return new.fill_(torch.nan)
    return new.fill_(0 if like.dtype is torch.bool else torch.iinfo(like.dtype).min)


def _is_unfilled(tensor: Tensor, changed: bool = True) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.dtype is torch.bool:
        return not changed and not bool(tensor.any())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return int(tensor.amin()) == torch.iinfo(tensor.dtype).min
    if tensor.itemsize == 1:  # has no largest element in torch
        return bool(torch.isnan(tensor).any())
    return bool(torch.isnan(tensor.amax()))  # NaN if any element is, without the memory of a mask


def _refuse(root: nn.Module, name: str) -> None:
    module_name, _, key = name.rpartition(".")
    owner = type(root.get_submodule(module_name)).__name__
    raise ConfigurationError(
        f"{key!r} of {module_name or 'the module'} ({owner}) was made on the meta device, and nothing initialises it: "
        f"{owner} has no reset_parameters() that does so, and no module around it has an _init_weights() that does. "
        "Add reset_parameters(), or make the model without empty_init / torch.device('meta')."
    )


def _current(root: nn.Module, name: str) -> Tensor | None:
    module_name, _, key = name.rpartition(".")
    module = root.get_submodule(module_name)
    return parameters_of(module).get(key, buffers_of(module).get(key))


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
