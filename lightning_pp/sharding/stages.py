"""The sharding of whole stages, as the runtime's programs command it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from torch import nn

from lightning_pp.schedule import Action, ActionKind
from lightning_pp.schedule.sharding import UnitPlan
from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.replicated_units import ReplicatedUnits
from lightning_pp.sharding.units.collective_times import CollectiveClock
from lightning_pp.sharding.units.windows import UnitWindows


class ShardedStages:
    """Carries out one rank's UNSHARD, RESHARD and REDUCE on the units of its stages.

    Args:
        units: The units of this rank.
        stages: For each stage of this rank, its units, in one order on all data-parallel ranks.
        called: For each of these stages, those of its units that a step calls, which are the ones to gather.
        clock: Looks, around every action, which collectives have ended.
    """

    def __init__(
        self,
        units: ShardedUnits | ReplicatedUnits,
        stages: Mapping[int, Sequence[str]],
        called: Mapping[int, Sequence[str]],
        clock: CollectiveClock,
    ) -> None:
        self._clock = clock
        self._units = units
        self._sharded = units if isinstance(units, ShardedUnits) else None
        self._stages = {stage: tuple(names) for stage, names in stages.items()}
        self._gathered = {stage: tuple(dict.fromkeys(called[stage])) for stage in stages}
        self._reduced_right_after: set[Action] = set()
        self._windows: UnitWindows | None = None
        self._to_reduce: dict[int, list[str]] = {}

    def begin(self, program: Sequence[Action], plan: UnitPlan | None, *, is_ragged: bool = False) -> None:
        """The next batch runs ``program``.

        Args:
            program: This rank's; the same on all data-parallel ranks, up to microbatches that some of them have not.
            plan: How it gathers unit by unit; None if it gathers whole stages.
            is_ragged: Whether some rank has fewer microbatches.
        """
        self._reduced_right_after = {
            action
            for action, following in pairwise(program)
            if action.kind is ActionKind.W and following == Action(action.stage, ActionKind.REDUCE)
        }
        self._to_reduce = {stage: list(reversed(names)) for stage, names in self._stages.items()}
        self._windows = None
        if self._sharded is not None:
            self._windows = self._sharded.follow(plan, is_ragged=is_ragged)

    def unshard(self, stage: int) -> None:
        """UNSHARD: starts to gather the stage's units; their calls wait for it."""
        if self._sharded is not None and self._windows is None:
            for unit in self._gathered[stage]:
                self._sharded.unshard(unit)

    def reshard(self, stage: int) -> None:
        """RESHARD: frees the stage's units."""
        if self._sharded is not None and self._windows is None:
            for unit in self._gathered[stage]:
                self._sharded.reshard(unit)

    def reduce(self, stage: int) -> None:
        """REDUCE: starts the reduction of the stage's units that have not been reduced yet, last unit first."""
        if self._windows is not None:
            self._windows.before(Action(stage, ActionKind.REDUCE))
        for unit in self._to_reduce.pop(stage, ()):
            self._units.reduce(unit)

    def before(self, action: Action) -> None:
        """An F, I, W or B is about to run."""
        self._clock.look()
        if self._windows is not None:
            self._windows.before(action)

    def after(self, action: Action) -> None:
        """An F, I, W or B has run."""
        self._clock.look()
        if self._windows is not None:
            self._windows.after(action)

    def finish(self) -> None:
        """The program has ended."""
        if self._windows is not None:
            self._windows.finish()

    def reducer(
        self, action: Action, queued: Callable[[], Collection[nn.Parameter]]
    ) -> Callable[[nn.Parameter], None] | None:
        """What to tell when the last W of a stage is done with a parameter, so that its unit can be reduced at once.

        Units are reduced in one order, last first, on every data-parallel rank; only when differs between them.

        Args:
            action: The W that is about to run.
            queued: Tells the parameters to whose gradients it adds.

        Returns:
            To be called with each of these when its gradient is complete; None if the W is not its stage's last.
        """
        if action not in self._reduced_right_after:
            return None
        to_reduce = self._to_reduce[action.stage]
        parameters = set(queued())
        awaited = {unit: parameters.intersection(self._units.accumulating(unit)) for unit in to_reduce}

        def reduce_complete() -> None:
            while to_reduce and not awaited[to_reduce[0]]:
                self._units.reduce(to_reduce.pop(0))

        def complete(parameter: nn.Parameter) -> None:
            for still_awaited in awaited.values():
                still_awaited.discard(parameter)
            reduce_complete()

        reduce_complete()
        return complete
