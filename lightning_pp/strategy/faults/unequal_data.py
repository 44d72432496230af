"""Ranks with different numbers of batches, of which one would wait for another for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage

from lightning_pp.distributed.meeting import among_all_ranks
from lightning_pp.distributed.watch.this_rank import Progress
from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy._lightning_private import active_loop
from lightning_pp.strategy.step.first_look import AroundLoader

_DATA = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}


def check_num_batches(trainer: pl.Trainer) -> None:
    """Compares how many batches the ranks have of what the trainer is about to run over; every rank has to call it.

    Loaders without a length have infinitely many here; see :class:`DataProgress`.

    Raises:
        ConfigurationError: On all ranks: the numbers differ.
    """
    what, numbers = _DATA[trainer.state.stage], active_loop(trainer).max_batches  # type: ignore[index]
    mine: list[float] = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    of_all: list[Any] = [None] * dist.get_world_size()
    with among_all_ranks():
        dist.all_gather_object(of_all, mine)
    for rank, numbers in enumerate(of_all):
        if numbers != of_all[0]:
            raise ConfigurationError(
                f"Rank 0 has {_written(of_all[0])} batches of {what} data, but rank {rank} has {_written(numbers)}. "
                "The rank with more batches would wait for ever. Give every rank the same number: datasets and "
                "samplers may depend on strategy.data_parallel_rank only. Drop or repeat the samples left over (as "
                "DistributedSampler does). unequal_data='shortest' ends all ranks with the first."
            )


class DataProgress:
    """This rank's progress in each of its data: in a fit, those of training and of validation.

    The main thread notes each batch as it begins; the thread that watches the ranks asks.
    """

    def __init__(self) -> None:
        self._begun: dict[str, tuple[Progress, Any]] = {}
        self._last: Progress | None = None

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Notes the batch whose step the trainer is about to run; those of a sanity check are passed over."""
        if trainer.sanity_checking:  # has passes of its own
            return
        loop = active_loop(trainer)
        batches = (loop.epoch_loop if trainer.training else loop).batch_progress
        what = _DATA[trainer.state.stage]  # type: ignore[index]
        number = batches.current.ready
        self._last = Progress(what, batches.total.ready - number, number, batches.is_last_batch)
        self._begun[what] = self._last, batches

    def forget(self) -> None:
        """A run over other data is about to begin."""
        self._begun, self._last = {}, None

    def __str__(self) -> str:
        """The batch that was begun last: ``batch 812 of training``."""
        return "the start of the run" if self._last is None else f"batch {self._last.num_batches} of {self._last.data}"

    def __call__(self) -> list[Progress]:
        """As of now; a pass has ended if its last batch has been completed."""
        # a copy in one step: the main thread may add to it meanwhile
        return [
            begun._replace(has_ended=begun.has_ended and batches.current.completed == begun.num_batches)
            for begun, batches in tuple(self._begun.values())
        ]


class ShortestLoader(AroundLoader):
    """A loader that ends on every rank when it has ended on one.

    Where a loader knows its length the shortest is agreed upon here. Otherwise the ranks ask each other before each
    batch whether all have one.

    Args:
        loader: Of this rank. Other attributes are its own.
        agree: Whether all ranks say yes; every rank has to call it. See ``Strategy.reduce_boolean_decision``.
    """

    def __init__(self, loader: Any, agree: Callable[[bool], bool]) -> None:
        super().__init__(loader)
        self._agree = agree
        lengths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lengths, sized_len(loader))
        self._length: int | None = None if None in lengths else min(lengths)

    def __len__(self) -> int:
        """Batches of the rank with the fewest."""
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on every rank")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """The batches that every rank has."""
        if self._length is not None:
            yield from islice(self.loader, self._length)
            return
        batches, nothing = iter(self.loader), object()
        while self._agree((batch := next(batches, nothing)) is not nothing):
            yield batch


def _written(numbers: Sequence[float]) -> str:
    return " + ".join(map(str, numbers)) or "no"
