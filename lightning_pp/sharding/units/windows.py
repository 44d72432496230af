"""Gathering unit by unit, ahead of the uses that a program will make, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_pp.schedule.program.action import Action
from lightning_pp.schedule.sharding import UnitPlan
from lightning_pp.sharding.units.group import UnitGroup


@dataclass(eq=False)
class UnitWindows:
    """Does the steps of a plan when the planned uses occur.

    The plan's gathers come in its order on every rank, whatever is called: uses that a rank skips have their gathers
    done when the next action begins. A use that the plan did not foresee (a checkpoint over several units runs them
    again first to last) is gathered when it comes, after what is used again last has been freed.

    Attributes:
        plan: For one rank and one batch.
        groups: What can be gathered, by name.
        free: Frees a group.
        is_ragged: Whether some data-parallel rank leaves out parts of the program. Then all uses have to be foreseen:
            others would not come by the gather.
    """

    plan: UnitPlan
    groups: Mapping[str, UnitGroup]
    free: Callable[[UnitGroup], None]
    is_ragged: bool = field(default=False, kw_only=True)
    _held: dict[str, int] = field(default_factory=dict, init=False)
    _num_steps_done: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)

    def before(self, action: Action) -> None:
        """``action`` begins: does the steps of all uses before it, and that of its first use."""
        uses = self.plan.uses_of[action]
        self._advance_to(uses.first)
        self._end = uses.end

    def after(self, action: Action) -> None:
        """``action`` has ended, and nothing is in use: frees and gathers what the next use needs."""
        self._advance_to(self.plan.uses_of[action].following)

    def finish(self) -> None:
        """The program has ended: does the steps of uses that were left out at its end, as other ranks do."""
        self._advance_to(len(self.plan.gathers.uses))

    def use(self, group: UnitGroup) -> None:
        """``group`` is about to be used, and what was used before it no longer is.

        Raises:
            RuntimeError: The use was not foreseen, and data-parallel ranks run different parts of the program.
        """
        current = self._num_steps_done - 1
        if not 0 <= current < len(self.plan.gathers.uses) or self.plan.gathers.uses[current] != group.name:
            for index in range(max(current, 0), self._end):
                if self.plan.gathers.uses[index] == group.name:
                    self._advance_to(index)
                    break
        if group.name not in self._held:
            if self.is_ragged:
                raise RuntimeError(
                    f"unit {group.name} was used out of its stage's order of calls (by a checkpoint over several "
                    "units, or a batch that calls units in another order). The replicas' batches have different "
                    "numbers of microbatches, so replicas would gather units in different orders. Give replicas "
                    "batches of one size (drop_last=True), checkpoint each unit by itself, raise unshard_budget, or "
                    "use sharding='shard_grad_op'"
                )
            self._start_gather(group.name)

    def _advance_to(self, use: int) -> None:
        """Does the steps up to the one before ``use``."""
        while self._num_steps_done <= use:
            step = self.plan.gathers.steps[self._num_steps_done]
            self._num_steps_done += 1
            for name in step.frees:
                self._drop(name)
            for name in step.gathers:
                if name not in self._held:
                    self._start_gather(name)

    def _start_gather(self, name: str) -> None:
        group = self.groups[name]
        while self._held and sum(self._held.values()) + group.num_bytes > self.plan.budget:
            self._drop(max(self._held, key=self._next_use))
        self._held[name] = group.num_bytes
        group.start_gather()

    def _drop(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self.free(self.groups[name])

    def _next_use(self, name: str) -> int:
        """The next use after the current one; what is not used again comes last."""
        try:
            return self.plan.gathers.uses.index(name, self._num_steps_done)
        except ValueError:
            return len(self.plan.gathers.uses)
