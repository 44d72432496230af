"""Step plans by batch signature: recorded once, then looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.planning.steps.state import INITIAL_STATE, NO_STATE, StepState
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.split._torch_private import version_of
from lightning_pp.split.data.tree import entries_of, is_object, leaves_of, own_containers, own_copy, tensors_of
from lightning_pp.split.dry_run.run import DryRun, dry_run
from lightning_pp.split.dry_run.same_path import PathComparison, places_of
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import Failure, StepRecord
from lightning_pp.split.reductions.recording import EarlierRun

_TEXT = "text"
# Enough for a bucketed sampler with some hundred lengths; a plan holds a few fakes and numbers per unit call.
MAX_PLANS = 512
MAX_PLANS_OF_A_SIGNATURE = 64
MAX_PATHS = 4


def signature_of(tree: Any) -> Hashable:
    """What two batches must share for a plan to serve both: containers, shapes, dtypes and plain values."""
    if isinstance(tree, Tensor):
        return (tree.shape, tree.dtype)
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


def key_of(step: str, others: Sequence[Any], data: Any, frozen: Collection[str], *, is_part: bool = False) -> Hashable:
    """What steps must share for a plan to serve them.

    Args:
        step: Name of the step.
        others: What it is given besides the batch and its index.
        data: The microbatch.
        frozen: Names of the parameters that require no gradient; none where none does.
        is_part: Whether the step ends once for all microbatches.
    """
    return step, signature_of(others), frozenset(frozen), (signature_of(data), is_part)


def without_sizes(signature: Hashable) -> Hashable:
    """``signature`` without the sizes of tensors and without numbers: that of all batches that differ in these only."""
    if isinstance(signature, torch.Size):
        return len(signature)
    if isinstance(signature, tuple):
        return tuple(map(without_sizes, signature))
    return None if type(signature) in (int, float) else signature


class UnrecordedRun:
    """Stands for a dry run if the step is rehearsed or measured.

    Args:
        copies_batch: Whether the step gets a copy of its batch, into which it may write.

    Attributes:
        reads_progress: Whether the step may depend on the training's progress.
    """

    def __init__(self, *, copies_batch: bool = True) -> None:
        self.reads_progress = False
        self._copies_batch = copies_batch
        self._own: Any = None
        self._versions: list[int] = []

    def own(self, batch: Any) -> Any:
        """The batch for this run of the step."""
        self._own = own_copy(batch) if self._copies_batch else own_containers(batch)
        self._versions = [version_of(tensor) for tensor in tensors_of(self._own)]
        return self._own

    @property
    def edits_batch(self) -> bool:
        """Whether the step has written into its batch."""
        return self._versions != [version_of(tensor) for tensor in tensors_of(self._own)]

    def need_at_end(self, value: Any, place: str | None = None) -> None:
        """What a sink is given."""

    def note_progress_read(self) -> None:
        """That the step may depend on the training's progress."""
        self.reads_progress = True


@dataclass(eq=False)
class _UsedPlan:
    """A plan, the state in which a step was last known to follow it, and a number that plans of one path share."""

    plan: StepPlan
    state: StepState
    path: int


class StepPlanCache:
    """Keeps the plan for each signature of microbatches.

    Args:
        module: The whole model.
        units: Its units.
        fake_parameters: Makes the fakes for dry runs.
        recomputation: Which units are run again in backward, and what they save even so.

    Attributes:
        num_recorded: How many steps had to be recorded for a plan.
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
        # by signature; the plan that was used last is at the end
        self._plans: OrderedDict[Hashable, list[_UsedPlan]] = OrderedDict()
        # by signature without sizes the plan of each path that was used last, in that order
        self._paths_taken: OrderedDict[Hashable, dict[int, _UsedPlan]] = OrderedDict()
        self._num_paths = self.num_recorded = 0
        self._stage_of_unit: Mapping[str, int] = {}
        self._num_stages = 0
        self._owners: Mapping[str, Collection[int]] = {}
        self._failure: Failure | None = None
        # the recording that the model was cut by, the key of its step, and what its units were like
        self._start: tuple[Hashable, StepRecord, Hashable] | None = None

    @cached_property
    def _paths(self) -> PathComparison:
        return PathComparison(self._module, self._units, self._fake_parameters)

    def set_partition(
        self,
        stage_of_unit: Mapping[str, int],
        num_stages: int,
        owners: Mapping[str, Collection[int]],
        failure: Failure | None = None,
    ) -> None:
        """Fixes which stage each unit is on, and which stages hold each parameter, by canonical name.

        If the step for which that was decided could not be recorded whole, ``failure`` says why.
        """
        self._failure = failure
        self._stage_of_unit, self._num_stages, self._owners = stage_of_unit, num_stages, owners
        self._plans.clear()
        self._paths_taken.clear()

    def start_with(self, key: Hashable, record: StepRecord, *, with_gradients: bool) -> None:
        """Takes the recording that the model was cut by: it serves the first step that is rehearsed to follow it.

        Args:
            key: That of the recorded step, see :func:`key_of`.
            record: The recording.
            with_gradients: Whether it is of a training step.
        """
        kinds = self._paths.unit_sizes.kinds()
        self._start = (key, with_gradients, self._module.training), record, kinds

    def _take_start(self, key: Hashable, taken: dict[int, _UsedPlan]) -> None:
        """Adds the plan of the first recording to those like ``key``, unless a unit was changed since then."""
        if self._start is None or without_sizes(self._start[0]) != without_sizes(key):
            return
        (of_start, record, kinds), self._start = self._start, None
        if kinds == self._paths.unit_sizes.kinds():
            self._num_paths += 1
            taken[self._num_paths] = used = _UsedPlan(self._built(record), NO_STATE, self._num_paths)
            self._plans.setdefault(of_start, []).append(used)

    def record(
        self,
        step: Callable[[DryRun], Any],
        *,
        with_gradients: bool,
        seed_inter_unit: Callable[[int], None] | None = None,
        earlier: EarlierRun | None = None,
        may_fail: bool = False,
    ) -> StepRecord:
        """A dry run of ``step``; see :func:`lightning_pp.split.dry_run.run`."""
        record = dry_run(
            step,
            units=self._units,
            fake_parameters=self._fake_parameters,
            with_gradients=with_gradients,
            seed_inter_unit=seed_inter_unit,
            policy=self._recomputation.policy if with_gradients else None,
            earlier=earlier,
            may_fail=may_fail,
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
        state: StepState = INITIAL_STATE,
        rehearses: bool = False,
    ) -> StepPlan:
        """The plan for ``key``; records ``step`` if there is none yet.

        A step is **dynamic** if the shapes of its batch do not decide its path: the recording saw it read values of the
        batch or random numbers, or the caller knows. There are then several plans for a key, and each microbatch
        is rehearsed to pick one. Any other step is rehearsed when its state has changed since the plan was last used.

        Args:
            key: Steps with equal keys may share a plan.
            step: Runs the user's step.
            with_gradients: Whether it is a training step.
            seed_inter_unit: Given the index of a unit call (-1: the step's start), seeds generators for the code after
                it.
            state: What the step may depend on besides its batch.
            rehearses: Whether the step is dynamic whatever the recording saw.

        Raises:
            SplitError: As :func:`dry_run` and :func:`build_plan` say, or a stage uses a parameter that it has not.
        """
        key = (key, with_gradients, self._module.training)
        plans = self._plans.setdefault(key, [])
        self._plans.move_to_end(key)

        def is_as_before(used: _UsedPlan) -> bool:
            record = used.plan.record
            draws = record.may_branch_at_random and seed_inter_unit is not None
            is_dynamic = rehearses or draws or record.depends_on_batch_values
            return not is_dynamic and state.matches(used.state, with_progress=record.reads_progress)

        follow = partial(self._followed, step=step, seed_inter_unit=seed_inter_unit, with_gradients=with_gradients)
        taken = self._paths_taken.setdefault(without_sizes(key), {})
        self._take_start(key, taken)
        used = next(filter(is_as_before, reversed(plans)), None) or self._on_path_taken(plans, taken, state, follow)
        if used is None:
            self.num_recorded += 1
            record = self.record(step, with_gradients=with_gradients, seed_inter_unit=seed_inter_unit)
            used = next((used for used in plans if _plan_fields(used.plan.record) == _plan_fields(record)), None)
            if used is None:
                self._num_paths += 1
                used = _UsedPlan(self._built(record), state, self._num_paths)
                plans.append(used)
        used.state = state
        if used is not plans[-1]:
            plans.remove(used)
            plans.append(used)
        taken.pop(used.path, None)
        taken[used.path] = used
        self._forget_the_oldest(plans, taken)
        return used.plan

    def record_of_reductions(
        self,
        plan: StepPlan,
        step: Callable[[DryRun], Any],
        seed_inter_unit: Callable[[int], None],
        earlier: EarlierRun | None,
        *,
        with_gradients: bool,
    ) -> StepRecord:
        """A record whose reductions are those of ``step``, which follows ``plan``: by a rehearsal, or else a dry run.

        Args:
            plan: The plan of the step.
            step: Runs the user's step.
            seed_inter_unit: As for :meth:`plan`.
            earlier: A dry run of the step on fewer samples; see :class:`ReductionRecorder`.
            with_gradients: Whether it is a training step.
        """
        record = plan.record
        if earlier is None and not (record.is_resized or record.has_dynamic_shapes):
            return record
        arguments: dict[str, Any] = {"with_gradients": with_gradients, "seed_inter_unit": seed_inter_unit}
        at_this_size, found = earlier or EarlierRun((), 1.0), None
        if not record.value_reads_in_tail:  # what a rehearsal makes up for each of them does not grow with the batch
            found = self._followed(plan, step=step, is_alike=True, earlier=at_this_size, **arguments)
        return found or self.record(step, earlier=earlier, **arguments)

    def _on_path_taken(
        self, plans: list[_UsedPlan], taken: Mapping[int, _UsedPlan], state: StepState, follow: Callable[..., Any]
    ) -> _UsedPlan | None:
        """Rehearses the step on the paths that were taken; the plan among ``plans``, or a new one; None for none.

        Args:
            plans: Those of the same signature.
            taken: The last plan of each path, whatever its sizes.
            state: The state of the step.
            follow: Rehearses the step beside a plan.
        """
        own = set(map(id, plans))
        # the last of each path; those of this signature come last, and are rehearsed first
        for used in reversed(list({each.path: each for each in (*taken.values(), *plans)}.values())):
            record = follow(used.plan, is_alike=id(used) not in own)
            if record is None:
                continue
            if record is used.plan.record and id(used) in own:
                return used
            same = (each for each in plans if each.path == used.path and each.plan.record.sizes == record.sizes)
            found = next(same, None)
            if found is None:
                found = _UsedPlan(used.plan.resized(record), state, used.path)
                plans.append(found)
            return found
        return None

    def _forget_the_oldest(self, plans: list[_UsedPlan], taken: dict[int, _UsedPlan]) -> None:
        del plans[:-MAX_PLANS_OF_A_SIGNATURE]
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        while len(taken) > MAX_PATHS:
            del taken[next(iter(taken))]
        while len(self._paths_taken) > MAX_PLANS:
            self._paths_taken.popitem(last=False)

    def _built(self, record: StepRecord) -> StepPlan:
        """The plan of a recorded step."""
        try:
            plan = build_plan(record, self._stage_of_unit, self._num_stages)
            self._check_parameters(record)
        except SplitError as error:
            if self._failure is None:
                raise
            raise SplitError(
                f"{error}\nThe step raised {self._failure} when it was run at set-up, so the model was cut without a "
                "recording: the order of its units, and parameters used outside of units, were unknown. Set what the "
                "step needs in __init__ or setup(), so that it can be run before training."
            ) from error
        return plan

    def _followed(
        self,
        plan: StepPlan,
        *,
        step: Callable[[DryRun], Any],
        seed_inter_unit: Callable[[int], None] | None,
        with_gradients: bool,
        is_alike: bool,
        earlier: EarlierRun | None = None,
    ) -> StepRecord | None:
        """Rehearses the step: the record of ``plan`` if it follows that, of this step's sizes; else None."""
        record, run = plan.record, UnrecordedRun()
        found = self._paths.followed(
            record,
            lambda: step(cast(DryRun, run)),
            seed_inter_unit or (lambda _: None),  # leaves the generators as they are
            plan.crossing_operations,
            with_gradients=with_gradients,
            is_alike=is_alike,
            earlier=earlier,
        )
        if (run.reads_progress and not record.reads_progress) or (run.edits_batch and not record.edits_batch):
            return None
        return found

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
                        f"{'has' if len(stages) == 1 else 'have'} it: the step for which the model was cut does not "
                        "use it there. Call the unit (its forward) instead, or do this on one device with a checkpoint."
                    )


def _plan_fields(record: StepRecord) -> list[Any]:
    """All that the plan of a step depends on, and when it serves another."""
    course: list[Any] = [
        (record.reads_progress, record.depends_on_batch_values, record.may_branch_at_random),
        (record.mutated_attributes, record.edits_batch),
        places_of(record.reductions),
        record.gradient_sources,
        record.tail.values,
        set(record.tail.parameters),
    ]
    for call in record.calls:
        course += call.unit, call.shapes, [(number, leaf.spec) for number, leaf in call.numbered_leaves()]
        course += call.reads.values, set(call.reads.parameters), call.tracks_gradients, call.differentiated
    for operation in record.operations.values():
        if operation.place.num_calls < len(record.calls):  # what follows the last call crosses nowhere
            course.append((operation.place, operation.reads, operation.result.spec, operation.can_cross))
    return course
