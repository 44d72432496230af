"""Step plans by batch signature: recorded once, then looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.planning.situation import NO_SITUATION, SETTLED_AFTER, Situation, Surroundings
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.split.data.tree import entries_of, is_object, leaves_of, own_containers, own_copy
from lightning_pp.split.dry_run.rehearsal import rehearse
from lightning_pp.split.dry_run.run import DryRun, dry_run
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.reductions.places import Place
from lightning_pp.split.reductions.recording import EarlierRun, Reduction, ReductionRecorder

_TEXT = "text"
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
        return _TEXT  # differs from sample to sample
    leaves = leaves_of(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        if not is_object(tree):
            return type(tree).__qualname__
        return (type(tree).__qualname__, *((place, signature_of(leaf)) for place, leaf in entries_of(tree, "")))
    return (type(tree), *map(signature_of, leaves))


class _NobodyListens:
    """Takes the place of a dry run where the step is only rehearsed.

    Args:
        own: Gives a batch of its own to the run.
    """

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own

    def need_at_end(self, value: Any, place: str | None = None) -> None:
        """What a sink is given."""

    def ask_of_progress(self, is_as_now: Callable[[Any], bool]) -> None:
        """What is asked of the training's progress."""


@dataclass(eq=False)
class _Known:
    """A plan that was made for a signature, and the situation in which the step last went so."""

    plan: StepPlan
    situation: Situation


@dataclass
class _OfOneSignature:
    """What is known of steps with one signature.

    Attributes:
        plans: The plans, the one that was used last at the end.
        num_batches_alike: Batches with other values that went as one before.
        values_matter: Whether one with nothing but other values did not.
        num_records_alike: Records in which only values inside units were others, and nothing else was.
    """

    plans: list[_Known] = field(default_factory=list)
    num_batches_alike: int = 0
    values_matter: bool = False
    num_records_alike: int = 0


class StepPlanCache:
    """Knows what each stage does with a microbatch of a given signature.

    Args:
        module: The whole model.
        units: Its units.
        fake_parameters: Makes the fakes for dry runs.
        recomputation: Which units are run again in backward, and what they save even so.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Mapping[str, nn.Module],
        fake_parameters: FakeParameters,
        recomputation: Recomputation | None = None,
    ) -> None:
        self._module = module
        self._units = units
        self._fake_parameters = fake_parameters
        self._recomputation = recomputation or Recomputation(())
        self._plans: OrderedDict[Hashable, _OfOneSignature] = OrderedDict()
        self._stage_of_unit: Mapping[str, int] = {}
        self._num_stages = 0
        self._owners: Mapping[str, Collection[int]] = {}
        self._surroundings = Surroundings(module, units)

    def set_partition(
        self, stage_of_unit: Mapping[str, int], num_stages: int, owners: Mapping[str, Collection[int]]
    ) -> None:
        """Fixes which stage each unit is on, and which stages hold each parameter, by canonical name."""
        self._stage_of_unit, self._num_stages, self._owners = stage_of_unit, num_stages, owners
        self._plans.clear()

    def situation(self, batch: Any, progress: Any) -> Situation:
        """What the steps of ``batch`` may go by, where the training has come to ``progress``."""
        return self._surroundings.situation(batch, progress)

    def record(
        self,
        step: Callable[[DryRun], Any],
        *,
        with_gradients: bool,
        seed_inter_unit: Callable[[int], None] | None = None,
        earlier: EarlierRun | None = None,
    ) -> StepRecord:
        """A dry run of ``step``; see :func:`lightning_pp.split.dry_run.run`."""
        record = dry_run(
            step,
            module=self._module,
            units=self._units,
            fake_parameters=self._fake_parameters,
            with_gradients=with_gradients,
            seed_inter_unit=seed_inter_unit,
            policy=self._recomputation.policy if with_gradients else None,
            earlier=earlier,
        )
        record.recomputed_units = self._recomputation.units
        return record

    def plan(
        self,
        key: Hashable,
        step: Callable[[DryRun], Any],
        *,
        with_gradients: bool,
        seed_inter_unit: Callable[[int], None] | None = None,
        situation: Situation = NO_SITUATION,
    ) -> StepPlan:
        """The plan for ``key``, from a dry run of ``step`` when there is none yet.

        The way of a step may hang on more than shapes: on numbers that it draws (layers dropped at random), on values
        in the batch (lengths, a task), on how far the training is, on attributes of the module. There are then several
        plans for a key; which one it is, is found out by rehearsing the step, where any of that is another than when
        the plan was last used. Values and attributes that were so for a handful of batches, and changed nothing, are
        no longer looked at: should they ever, the step's own check refuses it.

        Args:
            key: Says which steps have the same plan.
            step: Runs the user's step.
            with_gradients: Whether it is a training step.
            seed_inter_unit: Given the index of a unit call (-1: the step's start), seeds generators for the code after
                it.
            situation: What else the step may go by.

        Raises:
            SplitError: As :func:`dry_run` and :func:`build_plan` say, or a stage uses a parameter that it has not.
        """
        key = (key, with_gradients, self._module.training)
        known = self._plans.setdefault(key, _OfOneSignature())
        self._plans.move_to_end(key)
        for entry in reversed(known.plans):
            draws = entry.plan.record.may_branch_at_random and seed_inter_unit is not None
            others = self._surroundings.others(entry.plan.record, entry.situation, situation)
            if (draws or others or _values_decide(known, entry, situation)) and not self._goes_so(
                entry.plan, step, seed_inter_unit or _draw_on
            ):
                continue
            self._note_alike(known, entry, situation, others)
            return entry.plan
        record = self.record(step, with_gradients=with_gradients, seed_inter_unit=seed_inter_unit)
        for entry in known.plans:
            if not self._surroundings.others(entry.plan.record, entry.situation, situation):
                if _course_of(entry.plan.record) == _course_of(record):
                    return _with_other_values(entry.plan, known)
                known.values_matter = True
        plan = build_plan(record, self._stage_of_unit, self._num_stages)
        self._check_parameters(record)
        known.plans.append(_Known(plan, situation))
        del known.plans[:-MAX_PLANS_OF_A_SIGNATURE]
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _note_alike(
        self, known: _OfOneSignature, entry: _Known, situation: Situation, others: Collection[tuple[int, str]]
    ) -> None:
        """Notes that a step went as ``entry`` says, although ``others`` have changed since the last that did."""
        if entry.situation is not situation or situation is NO_SITUATION:
            known.num_batches_alike += 1
            self._surroundings.note_without_effect(others, entry.plan.record, situation)
            entry.situation = situation
        if entry is not known.plans[-1]:
            known.plans.remove(entry)
            known.plans.append(entry)

    def _check_parameters(self, record: StepRecord) -> None:
        """Raises :class:`SplitError` if a stage uses a parameter, outside the unit that holds it, and has it not."""
        of_calls = [(call.reads, self._stage_of_unit[call.unit]) for call in record.calls]
        for reads, stage in [*of_calls, (record.tail, self._num_stages - 1)]:
            for name, line in reads.parameters.items():
                stages = self._owners.get(name, (stage,))
                if stage not in stages:
                    raise SplitError(
                        f"{line} uses the parameter {name!r} outside of a call of its unit, on stage {stage}, and "
                        f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))} alone "
                        f"{'has' if len(stages) == 1 else 'have'} it: the step that the model was cut for does not use "
                        "it so. Call the unit (its forward) here as there, or do this on one device with a checkpoint."
                    )

    def _goes_so(self, plan: StepPlan, step: Callable[[DryRun], Any], seed_inter_unit: Callable[[int], None]) -> bool:
        if plan.record.updates:  # a rehearsal would leave parameters edited
            return True
        listener = cast(DryRun, _NobodyListens(own_copy if plan.record.edits_batch else own_containers))
        recorder = ReductionRecorder(is_fake, is_fake)
        with recorder:
            matches, failure = rehearse(
                plan.record,
                self._units,
                lambda: step(listener),
                self._module,
                self._fake_parameters.device,
                seed_inter_unit,
                compares_arguments=True,
            )
        # what the end of the step makes of made-up values says nothing
        return matches and (failure is not None or _places(recorder.reductions) == _places(plan.record.reductions))


def _places(reductions: Sequence[Reduction]) -> list[Place]:
    return [reduction.place for reduction in reductions]


def _draw_on(call: int) -> None:
    """Leaves the generators as they are."""


def _values_decide(known: _OfOneSignature, entry: _Known, situation: Situation) -> bool:
    """Whether values in the batch may decide how the step goes."""
    is_settled = known.num_batches_alike >= SETTLED_AFTER and not known.values_matter
    return (situation.is_opaque or entry.plan.record.hangs_on_values) and not is_settled


def _with_other_values(plan: StepPlan, known: _OfOneSignature) -> StepPlan:
    """``plan``, which a record gave again although units looked at other values than they did in its own.

    Such values may decide the shapes of outputs (the longest of some sequences), and mostly do not (a mask).
    """
    known.num_records_alike += 1
    if known.num_records_alike >= SETTLED_AFTER // 2 and not known.values_matter:
        for call in plan.record.calls:
            call.looks_at = None
    return plan


def _course_of(record: StepRecord) -> list[Any]:
    """All that the plan of a step depends on."""
    course: list[Any] = [
        _places(record.reductions),
        record.gradient_sources,
        record.tail.values,
        set(record.tail.parameters),
    ]
    for call in record.calls:
        course += call.unit, call.shapes, [(number, leaf.spec) for number, leaf in call.numbered_leaves()]
        course += call.reads.values, set(call.reads.parameters)
    return course
