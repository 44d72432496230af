"""Runs that end early: by ``exit()``, interrupted twice, or with nothing trained."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

_log = logging.getLogger(__name__)


def refuse_code_zero(exception: BaseException, rank: int) -> None:
    """Has ``exit()`` and ``exit(0)`` within a run end the process with 1, since what it is part of is not finished.

    Args:
        exception: What has ended the run on this rank.
        rank: This rank's number.
    """
    if isinstance(exception, SystemExit) and not isinstance(exception, SIGTERMException) and not exception.code:
        exception.code = 1
        _log.error(
            f"Rank {rank} called exit() before the run was finished. The other ranks fail without it, so the process "
            "ends with code 1, not 0. To end a training early, set trainer.should_stop = True."
        )


def end_at_once_when_interrupted_again(exception: BaseException, launcher: Any) -> None:
    """After a first Ctrl-C: the next one ends this process, and those that it has started, and waits for nothing.

    Lightning ignores it while it shuts down, which may have to wait for a checkpoint or a logger.
    """
    if not isinstance(exception, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return

    def leave(*_: Any) -> None:
        for process in getattr(launcher, "procs", []):
            process.kill()
        os.write(2, b"\nInterrupted again: ended at once.\n")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # without Python's own end, which waits for threads

    signal.signal(signal.SIGINT, leave)


def warn_nothing_trained(trainer: pl.Trainer) -> None:
    """Says why a fit has trained no batch, as far as it is known, with the numbers and what to set."""
    loop = trainer.fit_loop
    epoch, step = trainer.current_epoch, trainer.global_step
    numbers = f"epoch {epoch} of max_epochs={trainer.max_epochs}, step {step} of max_steps={trainer.max_steps}"
    if trainer.limit_train_batches == 0 or loop.max_batches == 0:
        advice = "There are no batches: check limit_train_batches and the length of the training data."
    elif 0 <= trainer.max_steps <= step:
        advice = f"All steps are done: set max_steps above {step}, or -1 for no limit."
    elif trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch:
        advice = f"All epochs are done: set max_epochs above {epoch}, or -1 to go on until max_steps."
    elif trainer.should_stop:
        advice = "trainer.should_stop was set before the first batch."
    else:
        advice = "Neither limit was reached: check hooks that end an epoch, and what the loader returns."
    rank_zero_warn(f"This fit has trained no batch: it began and ended at {numbers}. {advice}")
