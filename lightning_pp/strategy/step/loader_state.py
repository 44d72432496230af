"""What a loader draws from, as states that can be asked for and set again: host generators, and those of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

# how to ask for, and to set, the state of a generator
_Access: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]


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
    return [get() for get, _ in _own_generators(loader)]


def set_own_draws(loader: Any, states: Sequence[Any]) -> None:
    """Sets the generators of ``loader`` to what :func:`own_draws` returned."""
    for (_, put), state in zip(_own_generators(loader), states, strict=False):
        put(state)


def samplers_with_epochs(loader: Any) -> list[Any]:
    """The samplers of ``loader`` that are told the number of the epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler)
    return list({id(each): each for each in samplers if callable(getattr(each, "set_epoch", None))}.values())


def epochs_of(loader: Any) -> list[int]:
    """The epochs that the samplers of ``loader`` were told last."""
    return [int(getattr(sampler, "epoch", 0)) for sampler in samplers_with_epochs(loader)]


def _own_generators(loader: Any) -> list[_Access]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    holders = (loader, *samplers, getattr(loader, "dataset", None))
    held = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    found: dict[int, _Access] = {}
    for value in held:
        if isinstance(value, torch.Generator):
            found[id(value)] = value.get_state, value.set_state
        elif isinstance(value, random.Random):
            found[id(value)] = _of_python(value)
        elif isinstance(value, np.random.Generator):
            found[id(value)] = _of_numpy(value.bit_generator)
        elif isinstance(value, np.random.RandomState):
            found[id(value)] = _of_legacy_numpy(value)
    return list(found.values())


def _of_python(generator: random.Random) -> _Access:
    return generator.getstate, lambda state: generator.setstate((state[0], tuple(state[1]), state[2]))


def _of_legacy_numpy(generator: np.random.RandomState) -> _Access:
    return lambda: _listed(generator.get_state()), generator.set_state


def _of_numpy(generator: np.random.BitGenerator) -> _Access:
    def put(state: Any) -> None:
        generator.state = state

    return lambda: _listed(generator.state), put


def _listed(state: Any) -> Any:
    """A state without arrays, which a checkpoint that is loaded without running anything cannot hold."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return tuple(map(_listed, state)) if isinstance(state, tuple) else state
