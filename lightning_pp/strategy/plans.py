"""Step plans by batch signature: recorded once, then looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.split.dry_run import DryRun, dry_run
from lightning_pp.split.placeholders import Placeholders
from lightning_pp.split.plan import StepPlan, build_plan
from lightning_pp.split.record import StepRecord
from lightning_pp.split.rehearsal import rehearse
from lightning_pp.split.tree import leaves_of

# Enough for a bucketed sampler with some hundred lengths; a plan holds a few fakes and numbers per unit call.
MAX_PLANS = 512
MAX_PLANS_OF_A_SIGNATURE = 64


def signature_of(tree: Any) -> Hashable:
    """What two batches must share for a plan to serve both: containers, shapes, dtypes and plain values."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if type(tree) in (list, tuple):
        return (type(tree), *map(signature_of, tree))
    if type(tree) is dict:
        return (dict, *((key, signature_of(value)) for key, value in tree.items()))
    if isinstance(tree, (bool, int, float, type(None))):
        return (type(tree), tree)
    if isinstance(tree, str):
        return "text"  # differs from sample to sample, and no shape hangs on it
    leaves = leaves_of(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return type(tree).__qualname__
    return (type(tree), *map(signature_of, leaves))


class _NobodyListens:
    """Takes the place of a dry run where the step is only rehearsed."""

    def need_at_end(self, value: Any, place: str | None = None) -> None:
        """What a sink is given."""


class PlanBook:
    """Knows what each stage does with a microbatch of a given signature.

    Args:
        module: The whole model.
        units: Its units.
        placeholders: Makes the fakes for dry runs.
        recomputation: Which units are run again in backward, and what they save even so.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Mapping[str, nn.Module],
        placeholders: Placeholders,
        recomputation: Recomputation | None = None,
    ) -> None:
        self._module = module
        self._units = units
        self._placeholders = placeholders
        self._recomputation = recomputation or Recomputation(())
        self._plans: OrderedDict[Hashable, list[StepPlan]] = OrderedDict()
        self._stage_of_unit: Mapping[str, int] = {}
        self._num_stages = 0

    def set_partition(self, stage_of_unit: Mapping[str, int], num_stages: int) -> None:
        """Fixes which stage each unit is on."""
        self._stage_of_unit, self._num_stages = stage_of_unit, num_stages
        self._plans.clear()

    def record(
        self,
        step: Callable[[DryRun], Any],
        *,
        with_gradients: bool,
        seed_glue: Callable[[int], None] | None = None,
    ) -> StepRecord:
        """A dry run of ``step``; see :func:`lightning_pp.split.dry_run`."""
        record = dry_run(
            step,
            module=self._module,
            units=self._units,
            placeholders=self._placeholders,
            with_gradients=with_gradients,
            seed_glue=seed_glue,
            policy=self._recomputation.policy if with_gradients else None,
        )
        record.recomputed_units = self._recomputation.units
        return record

    def plan(
        self,
        key: Hashable,
        step: Callable[[DryRun], Any],
        *,
        with_gradients: bool,
        seed_glue: Callable[[int], None] | None = None,
    ) -> StepPlan:
        """The plan for ``key``, from a dry run of ``step`` when there is none yet.

        Where the calls of a step may hang on numbers that it draws (layers dropped at random), there are several plans
        for a key; which one it is, is found out by rehearsing the step with the generators seeded as they will be.

        Args:
            key: Says which steps have the same plan.
            step: Runs the user's step.
            with_gradients: Whether it is a training step.
            seed_glue: Given the index of a unit call (-1: the step's start), seeds generators for the code after it.
        """
        key = (key, with_gradients, self._module.training)
        known = self._plans.setdefault(key, [])
        self._plans.move_to_end(key)
        for plan in known:
            if not (plan.record.may_branch_at_random and seed_glue) or self._goes_so(plan, step, seed_glue):
                return plan
        record = self.record(step, with_gradients=with_gradients, seed_glue=seed_glue)
        plan = build_plan(record, self._stage_of_unit, self._num_stages)
        known.append(plan)
        del known[:-MAX_PLANS_OF_A_SIGNATURE]
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _goes_so(self, plan: StepPlan, step: Callable[[DryRun], Any], seed_glue: Callable[[int], None]) -> bool:
        matches, _ = rehearse(
            plan.record,
            self._units,
            lambda: step(cast(DryRun, _NobodyListens())),
            self._module,
            self._placeholders.device,
            seed_glue,
        )
        return matches
