"""Random numbers in a pipeline: inter-unit code draws the same on every stage, units draw from their own streams."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_pp.split.record.step_record import InterUnitDraws


class StepRandomness:
    """Seeds one microbatch on one stage.

    On one device a step draws all its numbers from one generator, in order. Stages run parts of that order, so each
    stretch of inter-unit code gets a stream that depends on the seed, the step, the microbatch and its place in the
    step, but not on the stage: noise that several stages use (diffusion time steps, masks) is the same on all of them.
    Units draw from the stage's own stream. The generators change hands only where inter-unit code draws, as the dry run
    saw it. Inter-unit code may draw from the generators of torch, Python and NumPy.

    Args:
        seed: Depends on the run's seed, the data-parallel rank, the step and the microbatch; equal on all stages.
        device: The device whose generator is seeded besides the host's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._seeds_python = True
        # the units' stream, while the generators are at the inter-unit code's
        self._unit_state: list[torch.Tensor] | None = None

    @classmethod
    def of_microbatch(cls, step_seed: int, microbatch: int, device: torch.device) -> StepRandomness:
        """That of one microbatch of a step."""
        return cls(step_seed * 1_009 + microbatch, device)

    @contextmanager
    def between_units(self, draws: InterUnitDraws) -> Iterator[None]:
        """Around a step's forward on a stage.

        Args:
            draws: Where its inter-unit code draws; :meth:`seed_inter_unit` is called after these unit calls.
        """
        self._seeds_python = draws.in_python
        restore = _keep_python_generators() if draws.in_python else None
        try:
            if -1 in draws.after:
                self.seed_inter_unit(-1)
            yield
        finally:
            if restore is not None:
                restore()
            self.enter_unit()

    def seed_inter_unit(self, index: int) -> None:
        """Seeds the generators for the stretch of inter-unit code after call ``index``."""
        seed = (self._seed * 1_000_003 + index + 1) % (1 << 63)
        if self._unit_state is None:
            self._unit_state = self._states()
        _seed_torch_generators(seed, self._device)
        if self._seeds_python:
            _seed_python_generators(seed)

    def enter_unit(self) -> None:
        """Before an owned unit's call: gives the generators back to the units."""
        if self._unit_state is not None:
            self._set_states(self._unit_state)
            self._unit_state = None

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self._device)


@contextmanager
def host_generators_untouched(seed: int, device: torch.device) -> Iterator[None]:
    """Around a whole step: seeds the generators for this rank's units and puts the host's back afterwards.

    Samplers and datasets draw from the host's generators (torch's, Python's and NumPy's), and every rank of a pipeline
    must see the same batches; so what units draw, which differs from stage to stage, must not move them.
    """
    host_state, restore_python = torch.get_rng_state(), _keep_python_generators()
    try:
        _seed_torch_generators(seed % (1 << 63), device)
        _seed_python_generators(seed)
        yield
    finally:
        torch.set_rng_state(host_state)
        restore_python()


def _seed_torch_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators of the host and of ``device``.

    ``torch.manual_seed`` seeds those of every kind of device, and formats the stack for each kind that is not there,
    which takes longer than most inter-unit code.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def _seed_python_generators(seed: int) -> None:
    """Seeds the global generators of Python and NumPy, of NumPy's if it is there."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def _keep_python_generators() -> Callable[[], None]:
    """What puts the present states of the global generators of Python and NumPy back.

    Each generator has 624 words that are taken apart and put together one by one, which takes about 0.1 ms: once in a
    step, and for a microbatch only where its inter-unit code draws from them.
    """
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)

    def restore() -> None:
        random.setstate(python_state)
        if numpy_state is None:
            return
        try:
            numpy.random.set_state(numpy_state)
        except ValueError as error:  # it is of another kind than the state
            raise RuntimeError(
                "NumPy's bit generator was exchanged during a step of the pipeline (numpy.random.set_bit_generator): "
                "do it before training, so that its state can be put back after each step"
            ) from error

    return restore
