"""The generators of a loader, those of the host and its own, as states that can be read and set."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_pp.split.side_effects.generators import state_access


def host_draws() -> list[Any]:
    """The states of the generators of this process, on the host."""
    return [torch.get_rng_state(), random.getstate(), _listed(np.random.get_state())]


def set_host_draws(states: Sequence[Any]) -> None:
    """Sets the generators of this process to what :func:`host_draws` returned."""
    torch.set_rng_state(states[0])
    random.setstate((states[1][0], tuple(states[1][1]), states[1][2]))
    np.random.set_state(states[2])


def own_draws(loader: Any) -> list[Any]:
    """The states of the generators that the loader, its samplers and its dataset hold as attributes."""
    return [_listed(get()) for get, _ in _own_generators(loader)]


def set_own_draws(loader: Any, states: Sequence[Any]) -> None:
    """Sets the generators of ``loader`` to what :func:`own_draws` returned."""
    for (_, put), state in zip(_own_generators(loader), states, strict=False):
        put(state)


def samplers_with_epochs(loader: Any) -> list[Any]:
    """The samplers of ``loader`` that have ``set_epoch``."""
    return list({id(each): each for each in _samplers(loader) if callable(getattr(each, "set_epoch", None))}.values())


def epochs_of(loader: Any) -> list[int]:
    """The last epochs of the samplers of ``loader``."""
    return [int(getattr(sampler, "epoch", 0)) for sampler in samplers_with_epochs(loader)]


def _samplers(loader: Any) -> tuple[Any, ...]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


def _own_generators(loader: Any) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Functions that read and set the state of each."""
    holders = (loader, *_samplers(loader), getattr(loader, "dataset", None))
    held = {id(value): value for holder in holders for value in getattr(holder, "__dict__", {}).values()}
    return [access for access in map(state_access, held.values()) if access is not None]


def _listed(state: Any) -> Any:
    """A state without arrays, which a checkpoint that is loaded without running anything cannot hold."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return tuple(map(_listed, state)) if isinstance(state, tuple) else state
