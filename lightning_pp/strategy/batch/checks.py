"""The first batches of a run are checked before they are run, and later ones if a step does something new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import SplitError, add_note
from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.split._torch_private import version_of
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.side_effects.module_state import preserved_state
from lightning_pp.split.unit_calls.compilation import uncompiled
from lightning_pp.strategy.batch.differences import Around, batch_norm_frozen, tolerance_of, warn_batch_norm
from lightning_pp.strategy.batch.part_check import Outcome, PartCheck, observed
from lightning_pp.strategy.batch.preparation import BatchPreparation
from lightning_pp.strategy.batch.run import BatchRun, StepCall
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.results.attributes import Changes
from lightning_pp.strategy.results.outputs import packed_outputs, unpacked_outputs
from lightning_pp.strategy.step.dry_steps import loggers_muted
from lightning_pp.strategy.step.progress import trainer_watched

MOST_LATE_CHECKS = 32
"""Batches with new branches that are checked, for each step; layers that are dropped at random make ever new ones."""

Pair = frozenset[Hashable]
"""Branches that microbatches of one batch take: one or two of them."""

NUM_CHECKED = {"training_step": 2, "validation_step": 1, "test_step": 1, "predict_step": 1}
"""Batches of a run of the trainer that are checked, by step."""


@dataclass(eq=False)
class BatchChecks:
    """Checks that a step computes the same from microbatches as from the batch.

    Attributes:
        preparation: Prepares parts of batches.
        groups: Join the ranks.
        precision: The precision plugin.
        device: Where this rank computes.
        forward: Runs microbatches of a prepared batch, forward only; what the last stage's step returned for each.
        is_on: Whether anything is checked.
    """

    preparation: BatchPreparation
    groups: ControlGroups
    precision: Precision
    device: torch.device
    forward: Callable[[BatchRun, Sequence[int]], list[Any]]
    is_on: bool = field(kw_only=True)
    _num_left: dict[str, int] = field(default_factory=dict, init=False)
    _reported: set[str] = field(default_factory=set, init=False)
    _seen: set[tuple[str, Pair]] = field(default_factory=set, init=False)
    _num_late: Counter[str] = field(default_factory=Counter, init=False)

    def start(self) -> None:
        """A run of the trainer begins."""
        self._num_left = dict(NUM_CHECKED)

    def check(self, call: StepCall, batch: Any, microbatches: Sequence[Microbatch], seed: int) -> bool:
        """Checks the batch if it is one of the first, and returns whether it was compared.

        Where checks are off, only numbers that the step changes on the module are looked at.

        Raises:
            SplitError: The step makes something else of microbatches than of a batch.
            NoLossError: On every rank of the pipeline: a training step returns None for the batch.
        """
        left = self._num_left.get(call.step, 0)
        if not left or (call.step == "training_step" and not call.training):  # one that is skipped has been checked
            return False
        self._num_left[call.step] = left - 1
        if len(microbatches) > 1 or self.groups.num_replicas > 1:
            self._check_part(call, batch, microbatches, seed)
        return self.is_on

    def unchecked_part(self, run: BatchRun) -> tuple[int, int] | None:
        """The part of a batch to check, if a microbatch takes a branch of the step that no check has seen; else None.

        Two branches that no check has seen beside each other are new as well; the part then has both. The last stage
        decides, since code of other ranks alone (``if trainer.is_global_zero``) has no effect on the loss.

        Returns:
            Into how many parts the batch is cut, and which of them it is; 0 parts for the first microbatch.
        """
        call, courses = run.call, run.courses
        is_checked = self.is_on and call.step in NUM_CHECKED and call.training == (call.step == "training_step")
        new = {pair for pair in _pairs(courses) if (call.step, pair) not in self._seen}
        if not new or not is_checked or (len(courses) == 1 and self.groups.num_replicas == 1):
            return None
        if self._num_late[call.step] == MOST_LATE_CHECKS:
            return None
        num_parts, index = _part_with(courses, new)
        size = len(courses) // max(1, num_parts)
        self._note_seen(call, courses[index * size : (index + 1) * size])
        return num_parts, index

    def _note_seen(self, call: StepCall, courses: Sequence[Hashable]) -> None:
        self._seen.update((call.step, pair) for pair in _pairs(courses))

    def check_part(self, run: BatchRun, batch: Any, part: tuple[int, int], seed: int) -> None:
        """Checks the :meth:`unchecked_part` of the last stage; of a replica that has none, its first microbatch.

        Raises:
            SplitError: As :meth:`check`.
        """
        try:
            self._check_part(run.call, batch, run.microbatches, seed, part if part[0] else None)
        except SplitError as error:
            add_note(error, f"Batch {run.call.batch_idx} was checked because {run.call.step} took a new branch in it.")
            raise
        self._num_late[run.call.step] += 1
        if self._num_late[run.call.step] == MOST_LATE_CHECKS:
            rank_zero_warn(
                f"In {MOST_LATE_CHECKS} batches {run.call.step} took branches that no check had seen. These batches "
                "were checked. New branches in later batches are not."
            )

    def merged_again(self, run: BatchRun) -> Changes:
        """What the batch changes on the module, by what a check of a part of it has shown; the same on every rank."""

        def merged() -> Any:
            copies = HostCopies()
            packed = packed_outputs(run.scopes.attributes.merged(run.num_samples_each, run.weights), copies)
            copies.end()
            copies.wait()
            return packed

        changes = self.groups.share(merged, "What the step changes on the module")
        return cast(Changes, unpacked_outputs(changes, self.device))

    def _check_part(
        self,
        call: StepCall,
        batch: Any,
        microbatches: Sequence[Microbatch],
        seed: int,
        part: tuple[int, int] | None = None,
    ) -> None:
        module = self.preparation.module
        if not self.is_on:
            changes = self.preparation.changes_attributes(call, microbatches[0], seed)
            if not any(self.groups.gather(changes, "whether a step changes attributes")):
                return
        elif call.training:
            warn_batch_norm(module, microbatches[0].num_samples)
        sizes = self.preparation.two_sizes(microbatches, batch, part)
        if all(self.groups.gather(sizes is not None, "whether a batch is checked")) and sizes is not None:
            tolerance = tolerance_of(module, step_dtypes(self.precision).compute, self.device)
            check = PartCheck(self.preparation, call.step, sizes, self.groups, tolerance, self._reported)
            (check.run if self.is_on else check.learn)(partial(self._observe, call, sizes.whole.data, seed))

    def _observe(
        self, call: StepCall, batch: Any, seed: int, microbatches: Sequence[Microbatch], around: Around
    ) -> Outcome:
        """Runs the step forward on a part of a batch, without a trace; what came of it."""
        preparation = self.preparation
        with ExitStack() as stack:
            for scope in (
                generators_untouched(self.device),
                preserved_state(preparation.module),
                loggers_muted(preparation.module.trainer),
                trainer_watched(preparation.module),
                batch_norm_frozen(preparation.module),
                torch.no_grad(),
                uncompiled(),
            ):
                stack.enter_context(scope)
            run = preparation.prepare(call, batch, microbatches, seed, 1.0, around=around)
            stack.callback(run.updates.undo)
            stack.enter_context(preparation.metrics.untouched())
            before = {(id(buffer), version_of(buffer)) for _, buffer in preparation.module.named_buffers()}
            # one by one, so that each starts from the same generators, or together, for an end on all of them
            each = [[index] for index in range(len(microbatches))]
            outputs: list[Any] = []
            for indices in each if run.whole is None else [list(range(len(microbatches)))]:
                outputs += self.forward(run, indices)
            self._note_seen(call, run.courses)
            moved = {
                name: buffer.detach().clone()
                for name, buffer in preparation.module.named_buffers()
                if (id(buffer), version_of(buffer)) not in before and not (is_fake(buffer) or buffer.is_complex())
            }
            run.scopes.logs.take_batch_values(preparation.metrics.batch_values)
            try:
                return observed(run, outputs if self.groups.is_last_stage else None, moved)
            except Exception as error:  # the other ranks hear of it when outcomes are exchanged
                return error


def _pairs(courses: Iterable[Hashable]) -> set[Pair]:
    """Each of them, and each two."""
    different = set(courses)
    return {frozenset((one, other)) for one in different for other in different}


def _part_with(courses: Sequence[Hashable], new: set[Pair]) -> tuple[int, int]:
    """The smallest part of a batch with two microbatches that take ``new`` branches.

    Returns the number of parts that the batch is cut into, and which of them it is; 0 parts if all take the same.
    """
    number, two = len(courses), {pair for pair in new if len(pair) > 1}
    for num_parts in (parts for parts in range(number // 2, 0, -1) if number % parts == 0):
        size = number // num_parts
        for first in range(0, number, size):
            if _pairs(courses[first : first + size]) & two:
                return num_parts, first // size
    return 0, 0
