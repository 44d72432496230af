"""What the actions of each stage cost, in milliseconds, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, TypeAlias

import numpy as np

from lightning_pp.errors import ScheduleError
from lightning_pp.schedule.simulation.costs_file import MICROBATCHES, CostsFile, read_costs_file

PerStage: TypeAlias = float | Sequence[float]
"""A number for all stages, or one number per stage."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one microbatch; each field is a number for all stages or a sequence with one number per stage.

    A full backward (B) costs ``backward_input + backward_weight``.

    Attributes:
        forward: F, milliseconds.
        backward_input: I, milliseconds.
        backward_weight: W, milliseconds.
        p2p: From the end of an action to the moment its result can be used on another rank, milliseconds, by the
            stage that sends. Between two stages of one rank nothing is paid.
        p2p_back: The same of gradients, which go to the stage before; None: as ``p2p``. They differ where a stage has
            one neighbour on its own node and one on another.
        held_after_forward: What a microbatch holds on the stage after F, in any unit of memory.
        held_after_input: What it still holds after I, in the same unit; after W it holds nothing.
        gather: UNSHARD, milliseconds, beside the computation.
        reduce: REDUCE, milliseconds, beside the computation.
        offload: OFFLOAD, and RELOAD as well, milliseconds, beside the computation.
        held_on_host: What a microbatch holds on the host from OFFLOAD to RELOAD, and not on the device, in the unit of
            ``held_after_forward``; 0: nothing can be offloaded.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    p2p: PerStage = 0.0
    held_after_forward: PerStage = 1.0
    held_after_input: PerStage = 1.0
    gather: PerStage = 0.0
    reduce: PerStage = 0.0
    p2p_back: PerStage | None = None
    offload: PerStage = 0.0
    held_on_host: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, (int, float)):
                numbers: tuple[float, ...] = (float(value),)
            else:
                numbers = tuple(float(number) for number in value)
                object.__setattr__(self, field.name, numbers)
            for stage, number in enumerate(numbers):
                if not math.isfinite(number) or number < 0:
                    raise ScheduleError(f"StageCosts.{field.name}[{stage}] is {number}: give a finite number >= 0")

    @property
    def num_stages(self) -> int | None:
        """Number of stages these costs are for; None when every field is one number for all.

        Raises:
            ScheduleError: Two fields have different numbers of stages.
        """
        lengths = {
            field.name: len(value) for field in fields(self) if isinstance(value := getattr(self, field.name), tuple)
        }
        if len(set(lengths.values())) > 1:
            raise ScheduleError(f"StageCosts has fields for different numbers of stages: {lengths}")
        return next(iter(lengths.values()), None)

    def per_stage(self, num_stages: int) -> ResolvedCosts:
        """Every field as one number per stage.

        Raises:
            ScheduleError: A field has another number of stages.
        """
        resolved: dict[str, tuple[float, ...]] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:  # p2p_back, which comes after p2p
                resolved[field.name] = resolved["p2p"]
            elif not isinstance(value, tuple):
                resolved[field.name] = (float(value),) * num_stages
            elif len(value) == num_stages:
                resolved[field.name] = value
            else:
                raise ScheduleError(
                    f"StageCosts.{field.name} has {len(value)} numbers for {num_stages} stages: "
                    "give one number, or one per stage"
                )
        return ResolvedCosts(**resolved)

    def with_share(self, share: PerStage) -> StageCosts:
        """Where OFFLOAD and RELOAD move that share only."""
        by_stage = (self.offload, self.held_on_host)
        offload, held_on_host = (np.multiply(np.array(each), share).tolist() for each in by_stage)
        return replace(self, offload=offload, held_on_host=held_on_host)

    def to_json(
        self,
        path: str | PathLike[str],
        *,
        held_unit: str = MICROBATCHES,
        measured_on: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the costs to a JSON file, with their units; see :mod:`lightning_pp.schedule.simulation.costs_file`.

        Args:
            path: The file.
            held_unit: Unit of ``held_after_forward`` and ``held_after_input``; ``"GiB"`` for measured bytes.
            measured_on: What they were measured on, as JSON has it: device, sizes, versions.
        """
        costs = {
            field.name: list(value) if isinstance(value := getattr(self, field.name), tuple) else float(value)
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
        CostsFile(costs, held_unit, measured_on or {}).write(path)

    @classmethod
    def from_json(cls, path: str | PathLike[str]) -> StageCosts:
        """Read what :meth:`to_json` wrote; the unit of memory is in ``costs_file.read_costs_file(path).held_unit``.

        Raises:
            ScheduleError: The file cannot be read, is malformed, or has costs for different numbers of stages.
        """
        try:
            costs = cls(**read_costs_file(path).costs)
            _ = costs.num_stages
        except ScheduleError as error:
            raise ScheduleError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
        return costs


@dataclass(frozen=True)
class ResolvedCosts:
    """The fields of :class:`StageCosts`, each with exactly one number per stage."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    p2p: tuple[float, ...]
    held_after_forward: tuple[float, ...]
    held_after_input: tuple[float, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    p2p_back: tuple[float, ...]
    offload: tuple[float, ...]
    held_on_host: tuple[float, ...]


UNIT_COSTS = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)
"""F, I and W all take one millisecond, transfers nothing: what schedules are drawn with when nothing is measured."""
