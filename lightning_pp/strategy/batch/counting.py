"""Counts the divisors of each microbatch's loss before the step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.planning.steps.state import StepState
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.rehearsal import Rehearsed, rehearse
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.reduction import Place
from lightning_pp.split.record.source_lines import innermost_user_line
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.reductions.counting import Counts, are_equal
from lightning_pp.split.reductions.facts import Facts
from lightning_pp.split.reductions.scaling import MADE_OF_A_COUNT, Count, Scale, ScaledStep
from lightning_pp.split.reductions.traces import CountTrace, Trace, counts_of
from lightning_pp.split.side_effects.module_state import StateAroundUnits
from lightning_pp.split.unit_calls.compilation import uncompiled
from lightning_pp.strategy._lightning_private import trainer_of
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.step.dry_steps import loggers_muted
from lightning_pp.strategy.step.progress import trainer_watched

_USES_BETWEEN_CHECKS = 1000
_MANY = 3  # what is read in place of 0, to see which numbers are made of it


@dataclass(frozen=True)
class BatchSteps:
    """The user's step on each microbatch of a batch.

    Attributes:
        name: Name of the step.
        microbatches: The batch.
        plans: The plan of each.
        call: Runs the step's code outside units on the microbatch of that index.
        seeds: For each, what seeds the generators for the code after a unit call.
        factor: What all weights are multiplied by.
        state: What the step may depend on besides its batch; None to rehearse every microbatch.
    """

    name: str
    microbatches: Sequence[Microbatch]
    plans: Sequence[StepPlan]
    call: Callable[[int], Any]
    seeds: Sequence[Callable[[int], None]]
    factor: float
    state: StepState | None

    @property
    def is_training(self) -> bool:
        """Whether it is a training step."""
        return self.name == "training_step"

    @property
    def records(self) -> list[StepRecord]:
        """The records of the plans, each once."""
        return list(dict.fromkeys(plan.record for plan in self.plans))


class StepCounting:
    """Counts by rehearsing the step, or by the trace of its counts alone if its path is known and counts are simple.

    A trace is what a rehearsal has shown of how the counts are made of the batch. It serves once it has given the
    counts of another rehearsal, is compared with one again after every 1,000 microbatches, and is dropped where
    anything has changed on which the step may depend.

    Args:
        fake_parameters: Those of the user's module.
        units: Its units.
        metrics: Left alone while counting.
        forward_context: Goes around steps, as of the precision plugin.
    """

    def __init__(
        self,
        fake_parameters: FakeParameters,
        units: Mapping[str, nn.Module],
        metrics: PipelineMetrics,
        forward_context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._fakes = fake_parameters
        self._module = cast(pl.LightningModule, fake_parameters.module)
        self._units = units
        self._state = StateAroundUnits(self._module, units)
        self._metrics = metrics
        self._forward_context = forward_context
        self._traces: WeakKeyDictionary[StepRecord, _Traced] = WeakKeyDictionary()

    def count(self, steps: BatchSteps, index: int, facts: Facts, scale: Scale) -> Counts:
        """The counts of a microbatch.

        Args:
            steps: The steps of the batch.
            index: The microbatch.
            facts: What is known of the step's calls.
            scale: The microbatch beside its batch.

        Raises:
            SplitError: The step cannot be rehearsed, or a rehearsal counts other than the trace that has served so far.
        """
        record, data = steps.plans[index].record, steps.microbatches[index].data
        needed = facts.counted(record.reductions)
        if not needed:
            return {}
        # for the same state, does it the same for all batches of the same shapes?
        draws = record.may_branch_at_random or record.inter_unit_draws.in_python
        varies = record.depends_on_batch_values or draws or record.edits_batch
        if steps.state is None or not steps.is_training or varies:
            return self._rehearsed(steps, index, facts, scale, _Until(needed))
        traced = self._traces.get(record) or self._traces.setdefault(record, _Traced())
        if not steps.state.matches(traced.state, with_progress=record.reads_progress):
            traced.start(steps.state)
        if traced.trace and traced.serves():
            return self._by_trace(traced.trace, data)
        if traced.trace is None:
            tracing = CountTrace(data, facts)
            counts = self._rehearsed(steps, index, facts, scale, _Until(needed, tracing))
            traced.trace = tracing.found if set(tracing.found) == set(needed) else {}
            return counts
        counts = self._rehearsed(steps, index, facts, scale, _Until(needed))
        if traced.trace:
            traced.compare(self._by_trace(traced.trace, data), counts, facts)
        return counts

    def _by_trace(self, trace: Trace, data: Any) -> Counts:
        with self._forward_context():
            return counts_of(trace, data)

    def _rehearsed(
        self, steps: BatchSteps, index: int, facts: Facts, scale: Scale, counted: _Until, read_for_none: int = 0
    ) -> Counts:
        """Rehearses the step until all counts are reached."""
        record, device = steps.plans[index].record, self._fakes.device
        scaled = ScaledStep(facts, scale, counted, read_for_none=read_for_none)
        with ExitStack() as stack:
            logs = StepLogs()
            stack.enter_context(logs.installed(self._module))
            logs.begin(None)
            stack.enter_context(self._metrics.suspended())
            stack.enter_context(loggers_muted(trainer_of(self._module)))
            stack.enter_context(trainer_watched(self._module))
            stack.enter_context(uncompiled())
            stack.enter_context(scaled)
            stack.enter_context(counted.tracing or nullcontext())
            stack.enter_context(self._fakes.all_fake() if self._fakes.stand_for_shards else nullcontext())
            call, preserving = partial(steps.call, index), self._state.preserved()
            _, failure = rehearse(record, self._units, call, device, steps.seeds[index], preserving=preserving)
        if failure is None or counted.are_complete:
            if scaled.reads_nothing and scale.num_samples == 1 and not read_for_none:
                others = _Until(list(counted))
                self._rehearsed(steps, index, facts, scale, others, read_for_none=_MANY)
                _refuse_numbers_of_none(counted, others, facts)
            return counted
        if not steps.is_training:  # an evaluation, whose end may need data; its first batch is checked
            return {}
        if isinstance(failure, SplitError):
            raise failure
        raise SplitError(
            f"{innermost_user_line(failure)} raised {type(failure).__name__} in a rehearsal on made-up values, which "
            f"counts what the loss divides by: {failure}. Compute the loss before this line, or set "
            "whole_batch_loss=True on the strategy."
        ) from failure


def _refuse_numbers_of_none(counts: Counts, others: Counts, facts: Facts) -> None:
    """Raises :class:`SplitError` if a number was made from a count, for a sample with a count of 0.

    Args:
        counts: What was counted; a number may be that of the sample itself, as ``len(x)`` is.
        others: The same where Python reads another number in place of 0.
        facts: What is known of the step's calls.
    """
    for place, count in counts.items():
        of_sample, of_many = (
            [part for part in each or () if not isinstance(part, Tensor)] for each in (count, others.get(place, count))
        )
        if of_sample != of_many and (fact := facts.find(place)) is not None:
            raise SplitError(MADE_OF_A_COUNT.format(fact.call.line))


class _Until(dict[Place, Count]):
    """What a rehearsal counts; leaves it once all is counted.

    Args:
        needed: What is.
        tracing: Called with each count.
    """

    def __init__(self, needed: Sequence[Place], tracing: CountTrace | None = None) -> None:
        super().__init__()
        self._needed = set(needed)
        self.tracing = tracing

    @property
    def are_complete(self) -> bool:
        """Whether all is counted."""
        return self._needed <= self.keys()

    def __setitem__(self, place: Place, count: Count) -> None:
        super().__setitem__(place, count)
        if self.tracing is not None:
            self.tracing.note_count(place)
        if self.are_complete:
            raise Rehearsed


class _Traced:
    """The trace of a recorded step's counts, and whether it can be used.

    Attributes:
        state: The step's state when the trace was made.
        trace: None where there is none yet, and empty where there can be none in this state.
    """

    def __init__(self) -> None:
        self.start(StepState())

    def start(self, state: StepState) -> None:
        """Forgets the trace; the next one is made in ``state``."""
        self.state = state
        self.trace: Trace | None = None
        self._num_uses_left = 0
        self._has_served = False

    def serves(self) -> bool:
        """Whether the next microbatch is counted by the trace, and not rehearsed."""
        self._num_uses_left -= 1
        return self._num_uses_left >= 0

    def compare(self, by_trace: Counts, rehearsed: Counts, facts: Facts) -> None:
        """Notes the counts of a rehearsal; raises :class:`SplitError` if a trace that was used was wrong."""
        if are_equal(by_trace, rehearsed):
            self._num_uses_left, self._has_served = _USES_BETWEEN_CHECKS, True
            return
        if self._has_served:
            lines = ", ".join(fact.call.line for fact in map(facts.find, rehearsed) if fact is not None)
            raise SplitError(
                f"{lines} divides by another quantity of the batch than in earlier batches, but nothing that the step "
                "is known to depend on has changed: shapes of the batch, plain attributes of the module, progress of "
                "the training. Keep what it depends on in an attribute, or set whole_batch_loss=True on the strategy."
            )
        self.trace = {}
