"""Runs a part of a batch in one piece and in two, compares, and says where samples were coupled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import BatchError, ConfigurationError, SplitError, add_note
from lightning_pp.split._torch_private import buffers_of
from lightning_pp.split.comparison.auxiliary import AuxiliaryLosses
from lightning_pp.split.comparison.consistency import Culprit, Seen, are_only_losses, first_culprit, is_close, watched
from lightning_pp.split.comparison.draws import Draws
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.source_lines import UNKNOWN_LINE, innermost_user_line
from lightning_pp.strategy.batch.differences import (
    MIX_BEFORE,
    Around,
    Difference,
    Found,
    Observed,
    find_differences,
    tell_unchecked,
    text_about,
    text_about_attributes,
)
from lightning_pp.strategy.batch.preparation import BatchPreparation
from lightning_pp.strategy.batch.run import BatchRun
from lightning_pp.strategy.batch.scaling import TwoSizes
from lightning_pp.strategy.batch.whole_batch import END_OF_BATCH
from lightning_pp.strategy.results.attributes import StepAttributes
from lightning_pp.strategy.results.learned import Learned
from lightning_pp.strategy.results.outputs import SKIPPED_IN_PART, NoLossError, loss_of

Outcome = Observed | Exception
"""The result of a run."""
_CHECKS = (
    "to check that its loss adds up. If it works for microbatches, check_first_batches=False turns this check off."
)
_LEARNS = (
    "to see whether the numbers that it changes on the module add up over microbatches. If it works for microbatches, "
    "change them in a hook such as on_train_batch_end."
)
Observe = Callable[[Sequence[Microbatch], Around], Outcome]
"""Runs the step on slices of the part, within the contexts of ``Around``."""


def observed(run: BatchRun, outputs: Sequence[Any] | None, buffers: Mapping[str, Tensor]) -> Observed:
    """Results of a run's microbatches (None on other stages than the last), and the ``buffers`` that it wrote into.

    Raises:
        NoLossError: A training step returned None for all of them.
        ConfigurationError: It did so for some of them.
    """
    outputs = [] if outputs is None else outputs[: len(run.weights)]
    num_skipped = sum(output is None for output in outputs)
    if run.call.training and 0 < num_skipped < len(outputs):
        raise ConfigurationError(SKIPPED_IN_PART)
    losses = [loss_of(output).detach() for output in outputs] if run.call.training else []
    return Observed(
        buffers,
        run,
        outputs,
        [float(loss) for loss in losses],
        losses[0].dtype if losses else None,
        run.scopes.logs.merge(run.weights, run.num_samples),
    )


@dataclass(eq=False)
class PartCheck:
    """Checks one part of one batch; every rank does it together.

    Attributes:
        preparation: Prepares the batches; notes the steps whose logged numbers are computed by formulas.
        step: Name of its step.
        sizes: The part, and what it is cut into.
        groups: Join the ranks.
        tolerance: How far values may be apart, relatively.
        reported: Attributes and auxiliary losses that have been reported so far; gets more.
    """

    preparation: BatchPreparation
    step: str
    sizes: TwoSizes
    groups: ControlGroups
    tolerance: float
    reported: set[str]

    @cached_property
    def _places(self) -> list[tuple[float, float]]:
        """Where each part begins in the whole, and its share of it."""
        parts = self.sizes.parts
        starts = [sum(part.num_samples for part in parts[:index]) for index in range(len(parts))]
        total = sum(part.num_samples for part in parts)
        return [(start / total, part.num_samples / total) for start, part in zip(starts, parts, strict=True)]

    def learn(self, observe: Observe) -> None:
        """Only finds out which numbers on the module add up over microbatches."""
        with self._failures_explained(_LEARNS):
            whole = _outcome(observe, [self.sizes.whole], self._of_whole(Draws()))
            _learn_what_adds_up(whole, _outcome(observe, self.sizes.parts, self._of_parts(Draws())))

    def run(self, observe: Observe, num_logged_before: int | None = None) -> None:
        """Compares the two; every rank learns the last stage's outcome before any continues.

        Args:
            observe: Runs the step.
            num_logged_before: How many logged numbers differed before formulas were followed.

        Raises:
            SplitError: The two differ, on any replica.
            NoLossError: A training step returned None for the part, in one piece and in two.
            ConfigurationError: It returned None for some of them.
        """
        draws = Draws()
        with self._failures_explained(_CHECKS):
            whole = _outcome(observe, [self.sizes.whole], self._of_whole(draws))
            parts = _outcome(observe, self.sizes.parts, self._of_parts(draws))

        def compare() -> tuple[bool, list[Difference]]:
            _learn_what_adds_up(whole, parts)
            return self._compared(whole, parts, draws)

        gathered = self.groups.all_or_none(compare, "What a check of a first batch found")
        self._warn_of_permuted(draws)
        differences = [difference for _, found in gathered for difference in found]
        if any(differ for differ, _ in gathered):
            tell_unchecked(self.step)
            differences = []
        of_replicas = self.groups.gather(differences, "the check of a first batch")
        if not any(of_replicas):
            return
        everywhere = [difference for found in of_replicas for difference in found]
        num_logged = sum(difference.is_logged for difference in everywhere)
        followed = self.preparation.follows_formulas
        if num_logged and num_logged_before is None and self.step not in followed:
            followed.add(self.step)
            return self.run(observe, num_logged)
        if num_logged == num_logged_before:
            followed.discard(self.step)
        self._tell(observe, (whole, parts), differences or next(found for found in of_replicas if found), everywhere)

    def _tell(
        self,
        observe: Observe,
        outcomes: tuple[Outcome, Outcome],
        shown: Sequence[Difference],
        everywhere: Sequence[Difference],
    ) -> None:
        """Raises or warns of the differences ``everywhere``, those of all replicas, in words about ``shown``."""
        are_harmless = all(it.is_attribute for it in everywhere) and not self._attributes_matter(observe, *outcomes)
        ends_run = any(difference.is_loss or difference.is_attribute for difference in everywhere)
        found = Found() if are_harmless else self._culprit(observe, ends_run, everywhere[0].is_loss)
        code = getattr(inspect.unwrap(getattr(type(self.preparation.module), self.step)), "__code__", None)
        where = self.step if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        new = [difference for difference in shown if difference.what not in self.reported]
        self.reported.update(difference.what for difference in new)
        if are_harmless:
            if new:
                rank_zero_warn(text_about_attributes(new, where))
            return
        if found.auxiliary and self.preparation.allows_auxiliary:
            if newly_found := set(found.auxiliary) - self.reported:
                rank_zero_info(
                    f"auxiliary_losses='per_microbatch': {self.step} ({where}) computes an auxiliary loss for each "
                    f"microbatch: {', '.join(sorted(newly_found))}. These are averaged over microbatches."
                )
                self.reported |= newly_found
            return
        first, sizes = (new or shown)[0], [part.num_samples for part in self.sizes.parts]
        text = text_about(self.step, first, found, sizes, first.line or where)
        if ends_run:
            raise SplitError(text)
        if new:
            rank_zero_warn(text + "".join(f" The same goes for: {other.what}." for other in new[1:]))

    def _warn_of_permuted(self, draws: Draws) -> None:
        for line, number in draws.permuted.items():
            if number == self.sizes.whole.num_samples and line not in self.reported:
                self.reported.add(line)
                rank_zero_warn(
                    f"{line} permutes the samples of each microbatch. One device permutes those of the whole batch. "
                    f"{MIX_BEFORE}"
                )

    def _compared(self, whole: Outcome, parts: Outcome, draws: Draws) -> tuple[bool, list[Difference]]:
        """Whether this rank drew differently in the two, and what differs; raises how one of them ended."""
        if isinstance(whole, NoLossError) != isinstance(parts, NoLossError) and self.groups.is_last_stage:
            raise ConfigurationError(SKIPPED_IN_PART)
        for outcome in (whole, parts):
            if isinstance(outcome, Exception):
                raise outcome
        if draws.repeated:
            raise SplitError(
                f"{draws.repeated} draws the same random numbers for every microbatch, but on one device every row of "
                "the batch has its own. The step seeds the generator that it draws from, or starts each microbatch "
                "from the same state. Seed it outside the step and draw from torch's default generator, or set "
                "num_microbatches=1."
            )
        if not (isinstance(whole, Observed) and isinstance(parts, Observed)):
            return draws.differ, []
        return draws.differ, find_differences(self.step, whole, parts, self.tolerance)

    def _attributes_matter(self, observe: Observe, whole: Outcome, parts: Outcome) -> bool:
        """Whether the step computes something else with the attributes that the whole has left than with the parts'."""
        mine = [each for each in (whole, parts) if isinstance(each, Observed)]
        left = [(each.run.scopes.attributes.places, each.merged[1], each.buffers) for each in mine]
        gathered = self.groups.gather_in_pipeline(left if self.groups.is_last_stage else None)
        of_last_stage = next(each for each in gathered if each is not None)

        def after(left: tuple[Any, Any, Mapping[str, Tensor]], own: Mapping[str, Tensor], on_whole: Around) -> Around:
            @contextmanager
            def around(index: int, stage: int | None) -> Iterator[None]:
                places, changes, buffers = left
                StepAttributes(self.preparation.module, places, Learned(), with_new=True).apply(changes)
                for name, value in {**buffers, **own}.items():
                    place, _, key = name.rpartition(".")
                    held = buffers_of(self.preparation.module.get_submodule(place))
                    if (buffer := held.get(key)) is None or buffer.shape != value.shape:
                        held[key] = value.clone()
                    elif not is_fake(buffer):
                        buffer.copy_(value)
                with on_whole(index, stage):
                    yield

            return around

        first, second = (
            _outcome(observe, [self.sizes.whole], after(left, each.buffers, self._of_whole(Draws())))
            for left, each in zip(of_last_stage, mine, strict=True)
        )
        outcomes = self.groups.all_or_none(partial(self._compared, first, second, Draws()), "What attributes do")
        matters = any(not difference.is_attribute for _, found in outcomes for difference in found)
        return any(self.groups.gather(matters, "what attributes do"))

    @contextmanager
    def _failures_explained(self, purpose: str) -> Iterator[None]:
        """In the block, errors of the user's step get a note that it ran for the check; type and text stay."""
        try:
            yield
        except (SplitError, BatchError):
            raise
        except Exception as error:
            if innermost_user_line(error) != UNKNOWN_LINE:  # otherwise not the user's step: another rank has failed
                sizes = " and ".join(map(str, sorted({part.num_samples for part in self.sizes.parts})))
                what = "samples" if self.sizes.is_cut_by_user else "rows"  # which are nodes in a batch of graphs
                note = (
                    f"{self.step} was run on parts of a batch, of {self.sizes.whole.num_samples} and of "
                    f"{sizes} {what}, {purpose}"
                )
                add_note(error, note)
            raise

    def _of_whole(self, draws: Draws) -> Around:
        return lambda index, stage: draws.around(stage, is_end=index == END_OF_BATCH)

    def _of_parts(self, draws: Draws) -> Around:
        return lambda index, stage: draws.around(stage, self._places[index], is_end=index == END_OF_BATCH)

    def _culprit(self, observe: Observe, ends_run: bool, is_loss: bool) -> Found:
        """Runs both again, watched: each part with the buffers as before the batch, and auxiliary losses of the whole.

        Args:
            observe: Runs the step.
            ends_run: Whether only differences count that end the run.
            is_loss: Whether it is the loss that differs.
        """
        draws, of_whole = Draws(), dict[int, Seen]()
        of_parts: list[dict[int, Seen]] = [{} for _ in self.sizes.parts]
        module, allows_auxiliary = self.preparation.module, self.preparation.allows_auxiliary
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

        def around(context: Any, of_run: dict[int, Seen], stage: int | None, share: float) -> ExitStack:
            stack = ExitStack()
            for name, buffer in module.named_buffers():  # as before the batch, whatever a part has left
                if name in buffers and not allows_auxiliary:  # then nothing else may be the reason
                    buffer.detach().copy_(buffers[name])
            stack.enter_context(context)
            if stage is not None:
                seen = of_run.setdefault(stage, Seen(share))
                if of_run is not of_whole and stage in of_whole:
                    seen.auxiliary = AuxiliaryLosses(of_whole[stage].functions, share)
                stack.enter_context(watched(seen, module, self.preparation.split.units))
            return stack

        on_whole, on_parts = self._of_whole(draws), self._of_parts(draws)
        whole = observe([self.sizes.whole], lambda index, stage: around(on_whole(index, stage), of_whole, stage, 1.0))
        parts = observe(
            self.sizes.parts,
            lambda index, stage: around(on_parts(index, stage), of_parts[index], stage, self._places[index][1]),
        )
        outcomes = self.groups.all_or_none(partial(self._compared, whole, parts, draws), "What a check found again")
        left = [each for _, found in outcomes for each in found if not each.is_attribute]
        weights = [share for _, share in self._places]
        found: dict[int, Culprit] = {}
        # each part's loss would be that of the whole if there were nothing else in it
        assert isinstance(whole, Observed) and isinstance(parts, Observed)
        is_alone = self.groups.is_last_stage and all(is_close(loss, whole.loss, 1e-9) for loss in parts.losses)
        of_whole[max(of_whole)].follow(whole.outputs if is_loss else ())
        lines, are_losses = set[str](), not is_alone or (allows_auxiliary and not whole.losses)
        for stage, seen in of_whole.items():
            others = [part[stage] for part in of_parts if stage in part]
            culprit = first_culprit(seen, others, weights, self.tolerance) if len(others) == len(of_parts) else None
            if culprit is not None:
                found[stage] = replace(culprit, at_end=self.groups.is_last_stage and stage == max(of_whole))
            lines = lines.union(*(other.auxiliary.lines for other in others))
            are_losses = are_losses and are_only_losses(seen, others, weights)
        moved = {name for seen in of_whole.values() for name in seen.moved}
        gathered = self.groups.gather_in_pipeline((found, moved, lines, are_losses))
        is_explained = all(are for *_, are in gathered) and not any(each.is_loss or not ends_run for each in left)
        lines = lines.union(*(each for *_, each, _ in gathered))
        culprits = {stage: culprit for one, *_ in gathered for stage, culprit in one.items()}
        of_replicas = self.groups.gather((is_explained, lines, culprits), "the auxiliary losses of a first batch")
        everywhere = {stage: culprit for *_, one in of_replicas for stage, culprit in one.items()}
        return Found(
            everywhere[min(everywhere)] if everywhere else None,
            [] if left else sorted({name for _, names, *_ in gathered for name in names}),
            sorted({line for _, each, _ in of_replicas for line in each}) if all(it for it, *_ in of_replicas) else [],
        )


def _learn_what_adds_up(whole: Outcome, parts: Outcome) -> None:
    """Notes which numbers on the module add up over microbatches."""
    if isinstance(whole, Observed) and isinstance(parts, Observed) and whole.outputs:
        whole.run.scopes.attributes.learned.learn([partial(each.run.merged, each.outputs) for each in (whole, parts)])


def _outcome(observe: Observe, microbatches: Sequence[Microbatch], around: Around) -> Outcome:
    """The result of a run. If the step returns None in a dry run, every rank ends before anything is run."""
    try:
        return observe(microbatches, around)
    except NoLossError as error:
        return error
