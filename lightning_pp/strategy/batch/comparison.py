"""Checks that all ranks of a pipeline have the same batch, the same messages and the same frozen parameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.fingerprints import Fingerprint, check_same_batch, check_same_given, fingerprint
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import SplitError
from lightning_pp.split.dry_run.carried_state import buffers_outside
from lightning_pp.split.fakes.parameters import has_data
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.unit_calls.call_arguments import fingerprint_of
from lightning_pp.strategy.batch.run import StepCall
from lightning_pp.strategy.step.data import reads_streams, warn_equal_streams
from lightning_pp.strategy.step.frozen import FrozenParameters

_BATCHES_CHECKED_BEFOREHAND = 2
_MOST_ELEMENTS = 1 << 20  # of a buffer that is compared


@dataclass(eq=False)
class BatchComparison:
    """Compares the first two batches of an epoch before they run; reports of batches check later ones.

    Attributes:
        module: The user's module.
        groups: Join the ranks.
        sizes: How many there are.
        frozen: Which parameters are frozen.
        rank: This process's global rank.
        units: The module's units; every rank has the buffers outside of them.
    """

    module: pl.LightningModule
    groups: ControlGroups
    sizes: ParallelSizes
    frozen: FrozenParameters
    rank: int
    units: Mapping[str, nn.Module]
    _fingerprint: Fingerprint | None = field(default=None, init=False)
    _first_buffers: dict[str, int] = field(default_factory=dict, init=False)
    _compared: set[int] = field(default_factory=set, init=False)

    def note(self, batch: Any, number: int, number_in_run: int) -> None:
        """Remembers the fingerprint of the batch that is about to be run: of all of it in a run's first batches."""
        if self.sizes.ranks_of_batch > 1:
            is_read_whole = number_in_run < _BATCHES_CHECKED_BEFOREHAND
            self._fingerprint = fingerprint(batch, self.rank, None if is_read_whole else number)

    def compare(self, call: StepCall, batch: Any) -> None:
        """Raises :class:`BatchError` or :class:`ConfigurationError` where ranks differ; every rank has to call it."""
        mine, groups = self._fingerprint, self.groups
        if mine is not None and call.batch_idx < _BATCHES_CHECKED_BEFOREHAND:
            given = fingerprint(batch, mine.rank)
            gathered = groups.gather_in_pipeline((mine, given, self.frozen.own(), self._buffers()))
            check_same_batch([mine, *(each for each, *_ in gathered if each.rank != mine.rank)], call.batch_idx)
            check_same_given([given, *(each for _, each, *_ in gathered if each.rank != mine.rank)], call.batch_idx)
            self._check_buffers([(each.rank, buffers) for each, *_, buffers in gathered], call)
            self.frozen.apply(frozen for *_, frozen, _ in gathered)
            is_first = call.training and call.batch_idx == 0
            if is_first and self.sizes.data_parallel > 1 and reads_streams(self.module.trainer):
                warn_equal_streams(groups.gather(mine.numbers, "the first batch of an epoch"))
        elif call.training and self.sizes.ranks_of_batch > 1:
            self.frozen.check(call.batch_idx)

    def _buffers(self) -> dict[str, tuple[int, bool]]:
        """By name a number for the content of each buffer outside of units, and whether it was another at first."""
        found = {
            f"{name}.{key}".lstrip("."): fingerprint_of((buffer,), {})
            for name, key, buffer in buffers_outside(self.module, self.units)
            if has_data(buffer) and buffer.numel() <= _MOST_ELEMENTS
        }
        return {
            name: (number, self._first_buffers.setdefault(name, number) != number) for name, number in found.items()
        }

    def _check_buffers(self, of_ranks: Sequence[tuple[int, dict[str, tuple[int, bool]]]], call: StepCall) -> None:
        """Raises :class:`SplitError` if a buffer differs between ranks and has changed on one of them.

        Buffers that have not changed may differ in their last digits, where hosts are of several kinds.
        """
        (rank, mine), *others = of_ranks
        for other, its in others:
            for name in mine:
                (number, has_changed), (another, its_has) = mine[name], its.get(name, mine[name])
                if number != another and (has_changed or its_has):
                    raise SplitError(
                        f"The buffer {name!r} has become another one on rank {rank} than on rank {other} of a pipeline "
                        f"before batch {call.batch_idx} of {call.step}. Every stage may read it. Code that makes a "
                        "buffer of parameters has those of its own stages alone: named_parameters() lists no others. "
                        "Keep an average of parameters in a Parameter with requires_grad=False, or use Lightning's "
                        "WeightAveraging."
                    )

    def compare_plans(self, call: StepCall, plans: Sequence[StepPlan]) -> None:
        """Raises :class:`SplitError` where ranks would send or log something else; every rank has to call it.

        Plans are made on each rank for itself, from the same batch. Messages that are new are compared once.
        """
        new = {key: plan for plan in plans if (key := hash(plan.messages)) not in self._compared}
        if not new or self.sizes.ranks_of_batch == 1:
            return
        self._compared.update(new)
        # logs are compared with new messages only: a plan that is new on one rank alone would wait for the others
        mine = [
            each
            for plan in new.values()
            for each in (*plan.messages, *map("self.log of {!r}".format, plan.record.logged))
        ]
        if len(set(self.groups.gather_in_pipeline(zlib.crc32("\n".join(mine).encode())))) == 1:
            return
        gathered = self.groups.gather_in_pipeline((self.rank, mine))
        (first, its), (other, others) = gathered[0], next(each for each in gathered if each[1] != gathered[0][1])
        pairs = zip_longest(its, others, fillvalue="nothing more")
        one, another = next((a, b) for a, b in pairs if a != b)
        raise SplitError(
            f"The ranks of one pipeline planned different messages for batch {call.batch_idx} of {call.step}. Rank "
            f"{first} expects {one}. Rank {other} expects {another}. Nothing was sent. The step must do the same on "
            "every rank of a pipeline: it must not depend on the rank (self.global_rank, trainer.is_global_zero), on "
            "time, or on random numbers that differ between ranks."
        )

    def put_back(self, mine: Fingerprint | None) -> None:
        """After :meth:`take`: the batch is run again."""
        self._fingerprint = mine

    def take(self) -> Fingerprint | None:
        """The fingerprint of the batch under way, for its report."""
        mine, self._fingerprint = self._fingerprint, None
        return mine
