"""The generators that user code draws from: torch's of the host and of a device, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _cuda_generators(device: torch.device) -> Sequence[torch.Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # nobody has drawn there
        return ()
    return [torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]]


_seeds: set[int] = set()  # that a step has had so far

OF_DEVICES: dict[str, Callable[[torch.device], Sequence[torch.Generator]]] = {"cuda": _cuda_generators}
"""For each kind of device that has generators of its own, a function that returns those of one device."""


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """The host's default generator and those of ``device``."""
    of_device = OF_DEVICES.get(device.type)
    return [torch.default_generator, *(of_device(device) if of_device is not None else ())]


def seed_torch(seed: int, device: torch.device, *, starts_step: bool = False) -> None:
    """Seeds :func:`torch_generators`; with ``starts_step`` earlier seeds are forgotten.

    ``torch.manual_seed`` seeds those of every kind of device, and formats the stack for each kind that is not there,
    which takes longer than most code between units.
    """
    if starts_step:
        _seeds.clear()
    _seeds.add(seed)
    for generator in torch_generators(device):
        generator.manual_seed(seed)


def is_seeded_here(generator: torch.Generator) -> bool:
    """Whether it has a seed that :func:`seed_torch` has given since the step began, and none of the user's."""
    return generator.initial_seed() in _seeds


def seed_python(seed: int) -> None:
    """Seeds the global generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@dataclass(frozen=True)
class GeneratorStates:
    """The states of the generators; can be pickled.

    Attributes:
        of_torch: States of :func:`torch_generators`.
        of_python: State of ``random``.
        of_numpy: State of ``numpy.random``.
    """

    of_torch: tuple[Tensor, ...]
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> GeneratorStates:
        """The present states.

        Those of Python and NumPy have 624 words that are taken apart and put together one by one, which takes about
        0.1 ms.
        """
        of_torch = tuple(generator.get_state() for generator in torch_generators(device))
        return cls(of_torch, random.getstate(), np.random.get_state(legacy=False))

    def put_back(self, device: torch.device) -> None:
        """Sets the generators to these states.

        Raises:
            RuntimeError: NumPy's generator is of another kind now.
        """
        for generator, state in zip(torch_generators(device), self.of_torch, strict=False):
            generator.set_state(state)
        self.put_back_python()

    def put_back_python(self) -> None:
        """Sets the global generators of Python and NumPy alone.

        Raises:
            RuntimeError: NumPy's generator is of another kind now.
        """
        random.setstate(self.of_python)
        try:
            np.random.set_state(self.of_numpy)
        except ValueError as error:
            raise RuntimeError(
                "NumPy's bit generator was replaced during a step of the pipeline (numpy.random.set_bit_generator). "
                "Replace it before training, so that its state can be restored after each step"
            ) from error


def state_access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Functions that read and set the state of a generator of torch, Python or NumPy; None for any other object."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        return partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    return None


def restorer(value: Any) -> Callable[[], object] | None:
    """What sets ``value``, a generator, to where it stands now; None for anything else."""
    access = state_access(value)
    return None if access is None else partial(access[1], access[0]())


@contextmanager
def generators_untouched(device: torch.device) -> Iterator[None]:
    """In the block, random numbers may be drawn; afterwards the generators are as before."""
    states = GeneratorStates.now(device)
    try:
        yield
    finally:
        states.put_back(device)
