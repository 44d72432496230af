"""Random numbers in a pipeline: inter-unit code draws the same on every stage, units draw from their own streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_pp.split.record.step_record import InterUnitDraws
from lightning_pp.split.side_effects.generators import (
    GeneratorStates,
    generators_untouched,
    seed_python,
    seed_torch,
    torch_generators,
)


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
        states = GeneratorStates.now(self._device) if draws.in_python else None
        try:
            if -1 in draws.after:
                self.seed_inter_unit(-1)
            yield
        finally:
            if states is not None:
                states.put_back_python()
            self.enter_unit()

    def seed_inter_unit(self, index: int) -> None:
        """Seeds the generators for the stretch of inter-unit code after call ``index``."""
        seed = (self._seed * 1_000_003 + index + 1) % (1 << 63)
        if self._unit_state is None:
            self._unit_state = [generator.get_state() for generator in torch_generators(self._device)]
        seed_torch(seed, self._device)
        if self._seeds_python:
            seed_python(seed)

    def enter_unit(self) -> None:
        """Before an owned unit's call: gives the generators back to the units."""
        if self._unit_state is not None:
            for generator, state in zip(torch_generators(self._device), self._unit_state, strict=True):
                generator.set_state(state)
            self._unit_state = None


@contextmanager
def step_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Around a whole step: seeds the generators for this rank's units and puts them back afterwards.

    Samplers, datasets and the hooks of batches draw from the generators of the host and of the device outside of steps,
    and every rank of a pipeline must see the same batches; so what units draw, which differs from stage to stage, must
    not move them.
    """
    with generators_untouched(device):
        seed_torch(seed % (1 << 63), device, starts_step=True)
        seed_python(seed)
        yield
