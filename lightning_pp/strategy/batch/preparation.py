"""Prepares a batch to run: plans, copies, corrections and scopes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import lightning.pytorch as pl

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import BatchError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.steps.plans import key_of, signature_of
from lightning_pp.planning.steps.state import AttributesOutsideUnits, StepState, holds_objects
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.whole_batch import WholeBatch
from lightning_pp.split.comparison.decisions import Decisions
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.data.tree import own_containers, own_copy
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.dry_run.weight_updates import RepeatedUpdates
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.record.whole_batch import plan_whole_batch
from lightning_pp.split.reductions.recording import EarlierRun
from lightning_pp.strategy.batch.counting import BatchSteps, StepCounting
from lightning_pp.strategy.batch.cutter import BatchCutter
from lightning_pp.strategy.batch.differences import Around
from lightning_pp.strategy.batch.run import BatchRun, StepCall
from lightning_pp.strategy.batch.scaling import BatchScaling, ScaledBatch, TwoSizes
from lightning_pp.strategy.batch.scopes import StepScopes
from lightning_pp.strategy.batch.whole_batch import END_OF_BATCH, ending_with_batch, in_one_piece
from lightning_pp.strategy.results.attributes import StepAttributes, kept_by_step, small_state
from lightning_pp.strategy.results.learned import Learned
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.step.dry_steps import call_step
from lightning_pp.strategy.step.frozen import FrozenParameters
from lightning_pp.strategy.step.held_output import output_held
from lightning_pp.strategy.step.progress import progress_of
from lightning_pp.strategy.step.recordings import RecordingWatch
from lightning_pp.strategy.step.refusals import refuse_carried_state
from lightning_pp.strategy.surroundings import Surroundings

_SAMPLES_TO_HALVE = 4
_LIGHTNINGS_ATTRIBUTES = frozenset(vars(pl.LightningModule()))
RecordedStep = Callable[[StepCall, Microbatch], Callable[[DryRun], Any]]
"""Makes the user's step on a microbatch, for a dry run."""


class BatchPreparation:
    """Prepares the batches of one rank.

    Args:
        surroundings: Where the pipeline runs, and what is asked of it.
        split: The split model.
        groups: Join the ranks.
        cutter: Cuts batches.
        metrics: The module's.
        frozen: Knows which parameters require a gradient.
        recorded_step: Makes steps for dry runs.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        split: SplitModel,
        groups: ControlGroups,
        cutter: BatchCutter,
        metrics: PipelineMetrics,
        frozen: FrozenParameters,
        recorded_step: RecordedStep,
    ) -> None:
        self.module = module = surroundings.module
        self.split = split
        self.metrics = metrics
        self.follows_formulas = set[str]()  # steps whose logged numbers are computed of those that they are made of
        self._precision = precision = surroundings.precision
        self._device = surroundings.device
        self._cutter = cutter
        self._recorded_step = recorded_step
        self._ends_with_batch = surroundings.options.schedule.whole_batch_loss
        self._is_dynamic = surroundings.options.batches.dynamic_step
        self._is_checked = surroundings.options.batches.check_first_batches
        self._frozen = frozen
        counting = StepCounting(split.fake_parameters, split.units, metrics, precision.forward_context)
        self.allows_auxiliary = surroundings.options.batches.auxiliary_losses == "per_microbatch"
        self._scaling = BatchScaling(groups, counting, allows_auxiliary=self.allows_auxiliary)
        self._plan_whole = lru_cache(maxsize=256)(plan_whole_batch)
        self._learned = Learned()
        self._recordings = RecordingWatch(split.plans)
        self._attributes = AttributesOutsideUnits(module, split.units, _LIGHTNINGS_ATTRIBUTES)

    def prepare(
        self,
        call: StepCall,
        batch: Any,
        microbatches: Sequence[Microbatch],
        seed: int,
        factor: float,
        *,
        around: Around | None = None,
        follows_estimates: bool = False,
    ) -> BatchRun:
        """Looks up what every stage does with each microbatch, and counts what the whole batch has to know.

        Args:
            call: The user's step.
            batch: The batch.
            microbatches: Its slices.
            seed: Of the step.
            factor: What losses are multiplied by.
            around: For the check of a part of a batch: what goes around its steps.
            follows_estimates: Whether a loss that does not add up over microbatches is an error.
        """
        if call.training and around is None:
            self._recordings.start_batch()
        state = StepState(progress_of(self.module.trainer, call.batch_idx), self._attributes.version())
        indices = range(len(microbatches)) if around is None else [0] * len(microbatches)
        seeds = [StepRandomness.of_microbatch(seed, index, self._device).seed_inter_unit for index in indices]
        if self._ends_with_batch and call.step != "predict_step":  # what is predicted has a row per sample anyway
            return self._prepare_whole(call, batch, microbatches, seed, factor, state, around)
        plans = self._plans(call, microbatches, seeds, state)
        for plan in dict.fromkeys(plans):
            refuse_carried_state(self.module, call.step, plan.record, len(microbatches))
        attributes, updates = self._kept_by(plans), self._updates_of(plans)
        call_part = self._caller(call, [microbatch.data for microbatch in microbatches], plans, updates, around)

        def rehearse(index: int) -> Any:
            with self._precision.forward_context(), output_held():
                return call_part(index, None)

        is_traced = around is None and not self._rehearses(microbatches[0])
        scaled = self._scaling.start_counting(
            BatchSteps(call.step, microbatches, plans, rehearse, seeds, factor, state if is_traced else None),
            sizes=lambda: self.two_sizes(microbatches, batch),
            double=self._cutter.doubled,
            record_at=partial(self._record_at, call, seeds[0], state),
            among_replicas=around is None,
            follows_estimates=follows_estimates,
        )
        lines = frozenset[str]().union(*(plan.record.value_reads_in_tail for plan in plans))
        decisions = Decisions(lines) if lines and self._is_checked else None
        return BatchRun(
            call, microbatches, plans, seed, call_part, self._scopes(attributes, scaled, decisions, call.step), updates
        )

    def changes_attributes(self, call: StepCall, microbatch: Microbatch, seed: int) -> bool:
        """Whether the step changes attributes for each microbatch, as far as a dry run shows."""
        if self._ends_with_batch:
            return False
        state = StepState(progress_of(self.module.trainer, call.batch_idx), self._attributes.version())
        seeds = StepRandomness.of_microbatch(seed, 0, self._device)
        return self._kept_by([self._plan(call, microbatch, seeds.seed_inter_unit, state)]).are_changed

    def _record_at(
        self,
        call: StepCall,
        seed_inter_unit: Callable[[int], None],
        state: StepState,
        part: Microbatch,
        earlier: EarlierRun | None,
    ) -> StepRecord:
        """A dry run of the step on a part of the batch."""
        plan, recorded = self._plan(call, part, seed_inter_unit, state), self._recorded_step(call, part)
        return self.split.plans.record_of_reductions(
            plan, recorded, seed_inter_unit, earlier, with_gradients=call.training
        )

    def _prepare_whole(
        self,
        call: StepCall,
        batch: Any,
        microbatches: Sequence[Microbatch],
        seed: int,
        factor: float,
        state: StepState,
        around: Around | None,
    ) -> BatchRun:
        """The same for a batch whose step ends once, on all of it."""
        number = len(microbatches)
        indices = range(number + 1) if around is None else [0] * (number + 1)
        seeds = [StepRandomness.of_microbatch(seed, index, self._device).seed_inter_unit for index in indices]
        whole = in_one_piece(batch, microbatches)
        of_batch = self._plan(call, whole, seeds[number if number > 1 else 0], state)
        plans = self._plans(call, microbatches, seeds, state, of_batch.record)
        refuse_carried_state(self.module, call.step, of_batch.record, number)
        plan = self._plan_whole(of_batch, tuple(plans), tuple(each.num_samples for each in microbatches))
        attributes, updates = self._kept_by([plan.tail]), self._updates_of([plan.tail])
        # the batch comes last, at END_OF_BATCH
        call_part = self._caller(call, [*(each.data for each in microbatches), batch], [plan.tail], updates, around)
        # without corrections: the loss is that of the whole batch already
        scopes = self._scopes(attributes, ScaledBatch([factor] * number, lambda: None), ends_with_batch=True)
        work = WholeBatch(plan, partial(scopes.run_tail, partial(call_part, END_OF_BATCH, None)), factor)
        return BatchRun(call, microbatches, plan.parts, seed, call_part, scopes, updates, work)

    def _scopes(
        self,
        attributes: StepAttributes,
        scaled: ScaledBatch,
        decisions: Decisions | None = None,
        step: str = "",
        *,
        ends_with_batch: bool = False,
    ) -> StepScopes:
        last = self.split.placement.num_stages - 1, decisions, ends_with_batch
        logs = StepLogs(step in self.follows_formulas)
        return StepScopes(self.module, self._precision, logs, self.metrics, attributes, scaled, *last)

    def _caller(
        self,
        call: StepCall,
        data: Sequence[Any],
        plans: Sequence[StepPlan],
        updates: RepeatedUpdates,
        around: Around | None,
    ) -> Callable[[int, int | None], Any]:
        """What runs the user's step on the ``data`` of an index; each run has a batch of its own to write into."""
        own = own_copy if any(plan.record.edits_batch for plan in plans) else own_containers

        def call_part(index: int, stage: int | None) -> Any:
            with (
                updates.of_step() if updates else nullcontext(),
                nullcontext() if around is None else around(index, stage),
                nullcontext() if around is None else output_held(),
            ):
                return call_step(self.module, call.step, own(data[index]), *call.rest, **call.kwargs)

        return call_part

    def _updates_of(self, plans: Sequence[StepPlan]) -> RepeatedUpdates:
        names = {name for plan in plans for name, others in plan.record.updates.items() if others}
        return RepeatedUpdates(self.split.fake_parameters, names)

    def _plans(
        self,
        call: StepCall,
        microbatches: Sequence[Microbatch],
        seeds: Sequence[Callable[[int], None]],
        state: StepState,
        end_of_batch: StepRecord | None = None,
    ) -> list[StepPlan]:
        """The plan of each microbatch; looked up once for equal ones, if values decide about no path."""
        plans, known = list[StepPlan](), dict[Hashable, StepPlan]()
        for microbatch, seed_inter_unit in zip(microbatches, seeds, strict=False):
            plan = known.get(signature := signature_of(microbatch.data))
            if plan is None:
                plan = self._plan(call, microbatch, seed_inter_unit, state, end_of_batch)
                is_dynamic = plan.record.may_branch_at_random or plan.record.depends_on_batch_values
                if not is_dynamic and not self._rehearses(microbatch):
                    known[signature] = plan
            plans.append(plan)
        return plans

    def _plan(
        self,
        call: StepCall,
        microbatch: Microbatch,
        seed_inter_unit: Callable[[int], None],
        state: StepState,
        end_of_batch: StepRecord | None = None,
    ) -> StepPlan:
        frozen, is_part = self._frozen.names() if call.training else [], end_of_batch is not None
        key = key_of(call.step, call.rest[1:], microbatch.data, frozen, is_part=is_part)
        recorded = self._recorded_step(call, microbatch)
        with self._recordings.watching(call.step, microbatch.data):
            return self.split.plans.plan(
                key,
                recorded if end_of_batch is None else ending_with_batch(recorded, end_of_batch),
                with_gradients=call.training,
                seed_inter_unit=seed_inter_unit,
                state=state,
                rehearses=self._rehearses(microbatch),
            )

    def _rehearses(self, microbatch: Microbatch) -> bool:
        return self._is_dynamic or holds_objects(microbatch.data)

    def _kept_by(self, plans: Sequence[StepPlan]) -> StepAttributes:
        mutated = dict.fromkeys(name for plan in plans for name in plan.record.mutated_attributes)
        # a step that reads its loss may branch by it, so that a dry run does not show all that it changes
        reads_late = any(plan.record.value_reads_in_tail for plan in plans)
        may_change = dict.fromkeys((*mutated, *(self._small_state if reads_late else ())))
        kept = kept_by_step(self.module, list(may_change), list(self.split.units))
        are_changed = not mutated.keys().isdisjoint(kept)
        return StepAttributes(self.module, kept, self._learned, are_changed=are_changed, with_new=reads_late)

    @cached_property
    def _small_state(self) -> list[tuple[str, str]]:
        return small_state(self.module)

    def two_sizes(
        self, microbatches: Sequence[Microbatch], batch: Any, part: tuple[int, int] | None = None
    ) -> TwoSizes | None:
        """A part of ``batch`` at two sizes: its first microbatch and halves, or, where those are small, two of them.

        Or that ``part`` of it: into how many parts it is cut, and which of them. None where there is only one sample.
        """
        if self._ends_with_batch and len(microbatches) > 1:  # the end may need all samples
            return TwoSizes(in_one_piece(batch, microbatches), microbatches)
        first, is_users = microbatches[0], self._cutter.is_users
        if part is None and first.num_samples < _SAMPLES_TO_HALVE and len(microbatches) > 1:
            part = max(1, len(microbatches) // 2), 0
        try:
            if part is not None:
                pieces = self._cutter.cut_into(batch, part[0])
                first = pieces[min(part[1], len(pieces) - 1)]
            parts = self._cutter.cut_into(first.data, 2)
        except BatchError:  # the user's function may refuse to cut a part further, such as a single document
            if not is_users and len(microbatches) > 1:
                raise
            return TwoSizes(in_one_piece(batch, microbatches), microbatches, True) if len(microbatches) > 1 else None
        return TwoSizes(replace(first, weight=1.0), parts, is_users) if len(parts) == 2 else None
