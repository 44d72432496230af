"""Ends a run at the same batch on all ranks when one of them gets a signal, and saves the training there.

If no batch begins in time, the process ends at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pp.strategy._lightning_private import (
    accumulates,
    note_sigterm,
    replace_signal_handling,
    requeue_by_slurm,
)
from lightning_pp.strategy._torch_private import job_store

_REQUEUE = "requeue"
_POLL_S = 0.2
_watching: list[int] = []  # the process that writes signals into a pipe, if it does


class CommonEnd:
    """Before every batch each rank asks the job's key-value store whether an end was set; a signal sets one.

    A rank ends batch n - 1 with the report of it, for which every rank of its pipeline has run forwards, and with
    replicas the last stage of each. So a rank that asks before batch n knows two things:

    * Every rank has asked before batch n - 1, so nobody is behind by more than one batch.
    * Nobody has asked before batch n + 1, for that takes this rank's part of batch n, which comes after the question.

    So when it sets the end before batch n + 1, that lies ahead of all ranks, and each of them sees it when it asks
    before that batch, if not earlier. Batches of training and of evaluation count alike.

    Args:
        store: The store of the job; None for one process.
        key: Of this run's ends.
        num_batches: Batches that this rank has run, of all that the ranks run together.
        rank: This rank's number.

    Attributes:
        requested: The name of the signal that has told this rank to end; None without one.
    """

    def __init__(self, store: Any, key: str, num_batches: Callable[[], int], rank: int = 0) -> None:
        self._store = store
        self._key = key
        self._num_batches = num_batches
        self._rank = rank
        self._num_ends = 0
        self._end: tuple[int, str, int] | None = None
        self.requested: str | None = None

    def has_come(self) -> bool:
        """Whether all ranks end here; to be asked before every batch."""
        now = self._num_batches()
        if self._end is None and self.requested is not None:
            mine = f"{now if self._store is None else now + 1} {self.requested} {self._rank}"
            self._apply(mine if self._store is None else self._store.compare_set(self._this_key, "", mine))
        elif self._end is None and self._store is not None and self._store.check([self._this_key]):
            self._apply(self._store.get(self._this_key))
        return self._end is not None and now >= self._end[0]

    @property
    def cause(self) -> tuple[str, int]:
        """The signal that the end comes of, and the rank that got it: the same on all ranks, once the end has come."""
        assert self._end is not None
        return self._end[1], self._end[2]

    def start_over(self) -> None:
        """After an end after which all ranks continue."""
        self._num_ends += 1
        self._end = self.requested = None

    @property
    def _this_key(self) -> str:
        return f"{self._key}/{self._num_ends}"

    def _apply(self, message: str | bytes) -> None:
        number, name, rank = (message.decode() if isinstance(message, bytes) else message).split()
        self._end = int(number), name, int(rank)


def _forget_in_child() -> None:
    """A forked process (a loader's worker) would write its signals into its parent's pipe."""
    if _watching:
        _watching.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


class SignalDeadline:
    """Calls ``end`` if no batch begins within ``seconds`` of a signal, or of the last batch that has begun since.

    Python runs a signal's handler in the main thread, between two of its lines, and that thread may wait in a
    collective for ever. The number of a signal is written into a pipe at once, and a thread reads it there.

    Args:
        seconds: How long a batch may take to begin.
        num_batches: Batches that this rank has begun.
        end: Ends the process.
    """

    def __init__(self, seconds: float, num_batches: Callable[[], int], end: Callable[[signal.Signals], None]) -> None:
        self._seconds = seconds
        self._num_batches = num_batches
        self._end = end
        self._done = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._former = -1
        self._thread: threading.Thread | None = None

    def start(self, signals: Collection[int]) -> None:
        """Watches for ``signals``, whose handlers are in place; nothing outside of the main thread, which has none."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is not None:
            return
        self._pipe = os.pipe()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, descriptor == self._pipe[0])
        self._former = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        _watching.append(os.getpid())
        self._thread = threading.Thread(target=self._watch, args=(signals,), name="pipeline-signals", daemon=True)
        self._thread.start()

    def reached(self) -> None:
        """The run ends here in order, however long a save takes."""
        self._done.set()

    def stop(self) -> None:
        """The run has ended; what has read signals before does so again."""
        self._done.set()
        if self._pipe is None or self._thread is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former)
            _watching.clear()
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for descriptor in self._pipe:
            os.close(descriptor)
        self._pipe = self._thread = None

    def _watch(self, signals: Collection[int]) -> None:
        assert self._pipe is not None
        while 0 not in (numbers := os.read(self._pipe[0], 64)):
            if self._former >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._former, numbers)
            if found := [number for number in numbers if number in signals]:
                self._count_down(signal.Signals(found[0]))

    def _count_down(self, number: signal.Signals) -> None:
        begun, since = self._num_batches(), time.monotonic()
        while not self._done.wait(_POLL_S):
            if (now := self._num_batches()) != begun:
                begun, since = now, time.monotonic()
            if time.monotonic() - since > self._seconds:
                self._end(number)


class Preemption:
    """After a SIGTERM or SIGUSR1 to any rank, ends the run between two batches, on all ranks before the same one.

    Lightning's handler starts a collective wherever the signal arrives, even in the middle of a step, while other ranks
    wait for this one, and its loop has one before every batch. Here the handler only notes the signal.

    A fit ends after an optimizer step, when no gradients wait for an update, and not within a validation. At the
    beginning of an epoch it ends after the next step: many loaders take a state saved there for that of the previous
    epoch, and would skip the epoch on a resume. The state is saved where the fit ends. The process ends with the exit
    code of the signal, 128 + its number: 143 for SIGTERM, 138 for SIGUSR1.

    Where Lightning requeues Slurm's jobs itself (:class:`SLURMEnvironment`), its own handler of that signal is called
    at such a place, on all ranks, and the training goes on until Slurm ends it. A handler of the user's own for SIGUSR1
    stays.

    Args:
        trainer: The trainer, about to run.
        number: Of this run among those of the processes.
        num_batches: Batches that this rank has run.
        wait_for_checkpoint: Returns when what was saved is in its place.
        deadline: Ends the process where the next batch does not come.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        number: int,
        num_batches: Callable[[], int],
        wait_for_checkpoint: Callable[[], None],
        deadline: SignalDeadline,
    ) -> None:
        self._trainer = trainer
        self._wait_for_checkpoint = wait_for_checkpoint
        self._is_past_beginning = False
        store = job_store() if dist.is_initialized() and trainer.world_size > 1 else None
        self._end = CommonEnd(store, f"lightning_pp/end/{number}", num_batches, trainer.global_rank)
        self._deadline = deadline
        replace_signal_handling(trainer, self._note, self._note_requeue, self._end_fit_if_time, self._deadline.start)

    def end(self) -> None:
        """The run has ended."""
        self._deadline.stop()

    def end_evaluation_if_time(self) -> None:
        """Before a batch of ``validate``, ``test`` or ``predict``, of which nothing is saved."""
        what = self._trainer.state.fn
        if what is None or what == TrainerFn.FITTING or not self._end.has_come():
            return
        self._deadline.reached()
        name, rank = self._end.cause
        rank_zero_info(f"{name} on rank {rank}: {what.value} has ended before its last batch.")
        self._leave(name)

    def _note(self, signum: int, _: Any) -> None:
        self._end.requested = self._end.requested or signal.Signals(signum).name

    def _note_requeue(self, signum: int, _: Any) -> None:
        self._end.requested = self._end.requested or _REQUEUE

    def _end_fit_if_time(self) -> None:
        if not self._end.has_come() or accumulates(self._trainer):
            return
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0 and not self._is_past_beginning:
            self._is_past_beginning = True  # with one batch in an epoch, the next question comes at a beginning too
            return
        name, rank = self._end.cause
        if name == _REQUEUE:
            requeue_by_slurm(self._trainer)
            self._end.start_over()
            self._is_past_beginning = False
            return
        self._deadline.reached()
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        text = (
            f"{name} on rank {rank}: training has ended after {progress.completed} batches of epoch "
            f"{self._trainer.current_epoch} (step {self._trainer.global_step})"
        )
        if getattr(self._trainer, "fast_dev_run", False):
            rank_zero_info(f"{text}; nothing is saved in a fast_dev_run.")
        else:
            started = time.monotonic()
            path = self._save()
            seconds = time.monotonic() - started
            rank_zero_info(f"{text}, and was saved in {seconds:.1f} s. Continue from it with ckpt_path={path!r}.")
        self._leave(name)

    def _save(self) -> str:
        trainer = self._trainer
        folder = trainer.default_root_dir
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                folder = os.fspath(callback.dirpath)
                break
        path = os.path.join(folder, f"preempted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")
        trainer.save_checkpoint(path)
        self._wait_for_checkpoint()
        return path

    def _leave(self, name: str) -> NoReturn:
        # Lightning's watcher of the processes that it has started kills this one when one of them ends with a code
        # that is not 0. From here on they all end by themselves.
        processes = getattr(self._trainer.strategy.launcher, "procs", None)
        if processes:
            processes.clear()
        self._trainer.strategy.barrier()
        note_sigterm(self._trainer)
        raise SIGTERMException(128 + signal.Signals[name])
