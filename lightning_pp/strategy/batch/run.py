"""A call of the user's step, and a batch that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pp.runtime.whole_batch import WholeBatch
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.weight_updates import RepeatedUpdates
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.strategy.batch.scopes import StepScopes
from lightning_pp.strategy.results.outputs import merge_outputs
from lightning_pp.strategy.results.reports import Merged


@dataclass(frozen=True)
class StepCall:
    """The user's step to call, and its arguments.

    Attributes:
        step: Its name.
        rest: What follows the batch.
        kwargs: Keyword arguments.
        training: Whether a backward follows.
    """

    step: str
    rest: list[Any]
    kwargs: dict[str, Any]
    training: bool

    @property
    def batch_idx(self) -> int:
        """The batch's index, 0 where the step is not given it."""
        return self.rest[0] if self.rest and isinstance(self.rest[0], int) else 0


@dataclass(frozen=True)
class BatchRun:
    """One batch, ready to run.

    Attributes:
        call: The user's step.
        microbatches: The batch.
        plans: What every stage does with each.
        seed: Seed of the step.
        call_step: Runs the user's step on the microbatch of an index, on a stage (None: in a rehearsal).
        scopes: What surrounds the steps: weights and corrections, logs, attributes that the steps change.
        updates: Parameters that the steps write into.
        whole: What is done once at the end, on the whole batch; None where each microbatch's step runs to its end.
    """

    call: StepCall
    microbatches: Sequence[Microbatch]
    plans: Sequence[StepPlan]
    seed: int
    call_step: Callable[[int, int | None], Any]
    scopes: StepScopes
    updates: RepeatedUpdates
    whole: WholeBatch | None = None

    @property
    def courses(self) -> list[Hashable]:
        """For each microbatch which branches of the step it takes; once it has run, those by weights as well."""
        decisions = self.scopes.decisions
        taken = {} if decisions is None else decisions.taken
        return [(plan.record.course, taken.get(index) or None) for index, plan in enumerate(self.plans)]

    @property
    def weights(self) -> list[float]:
        """Share of each run of the step that counts."""
        return [1.0] if self.whole is not None else [microbatch.weight for microbatch in self.microbatches]

    @property
    def num_samples(self) -> int:
        """Of the whole batch."""
        return sum(self.num_samples_each)

    @property
    def num_samples_each(self) -> list[int]:
        """Of each run of the step that counts."""
        each = [microbatch.num_samples for microbatch in self.microbatches]
        return [sum(each)] if self.whole is not None else each

    def merged(self, outputs: Sequence[Any]) -> Merged:
        """The output of the step for the whole batch, and its changes to the module."""
        shares = self.num_samples_each, self.weights
        merged = merge_outputs(outputs[: len(self.weights)], *shares, self.scopes.attributes.learned, self.call.step)
        return merged, self.scopes.attributes.merged(*shares)
