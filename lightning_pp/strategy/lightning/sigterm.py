"""Ending a fit at the same batch on all ranks, when one of them is told to, without a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pp.strategy._lightning_private import note_sigterm, replace_sigterm_handling
from lightning_pp.strategy._torch_private import store_of_job


class CommonEnd:
    """Before every batch each rank asks the job's key-value store whether an end was set; a signal sets one.

    A rank ends batch n - 1 with the report of it, for which every rank of its pipeline has run forwards, and with
    replicas the last stage of each. So a rank that asks before batch n knows two things:

    * Every rank has asked before batch n - 1, so nobody is behind by more than one batch.
    * Nobody has asked before batch n + 1, for that takes this rank's part of batch n, which comes after the question.

    So when it sets the end before batch n + 1, that lies ahead of all ranks, and each of them sees it when it asks
    before that batch, if not earlier.

    Args:
        store: The store of the job; None for one process.
        key: Of this fit's end.
        num_batches: Batches that this rank has run, of all that the ranks run together.
    """

    def __init__(self, store: Any, key: str, num_batches: Callable[[], int]) -> None:
        self._store = store
        self._key = key
        self._num_batches = num_batches
        self._end: int | None = None
        self.is_requested = False

    def has_come(self) -> bool:
        """Whether all ranks end here; to be asked before every batch."""
        if self._store is None:
            return self.is_requested
        now = self._num_batches()
        if self._end is None and self.is_requested:
            self._end = int(self._store.compare_set(self._key, "", str(now + 1)))
        elif self._end is None and self._store.check([self._key]):
            self._end = int(self._store.get(self._key))
        return self._end is not None and now >= self._end


def end_together_on_sigterm(trainer: pl.Trainer, number: int, num_batches: Callable[[], int]) -> None:
    """Has a SIGTERM to any rank end the training between two batches, on all ranks before the same one.

    Lightning's handler starts a collective wherever the signal finds it, also in the middle of a step, in which the
    other ranks wait for this one, and its loop has one before every batch. Here the handler only notes the signal.

    Args:
        trainer: The trainer, about to run.
        number: Of this run among those of the processes.
        num_batches: Training batches that this rank has run.
    """
    store = store_of_job() if dist.is_initialized() and trainer.world_size > 1 else None
    end = CommonEnd(store, f"lightning_pp/end/{number}", num_batches)

    def note(signum: int, _: Any) -> None:
        end.is_requested = True

    def end_if_time() -> None:
        if end.has_come():
            note_sigterm(trainer)
            raise SIGTERMException

    replace_sigterm_handling(trainer, note, end_if_time)
