"""Runs that end early: by ``exit()``, interrupted twice, with nothing trained, or with a device that waits.

After an exception, receives on a device wait for messages that no rank sends any more. Whoever waits for the device
after that waits for ever, be it to free memory or to print the error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pp.distributed.groups import abort_all, are_aborted

_ABORT_S = 10.0
_log = logging.getLogger(__name__)


def refuse_code_zero(exception: BaseException, rank: int) -> None:
    """Makes ``exit()`` and ``exit(0)`` within a run end the process with 1, because the run is not finished.

    ``exception`` has ended the run on ``rank``.
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


def end_device_work(channels: Iterable[Any], error: BaseException | None = None) -> None:
    """Ends what the device waits in; if it does not let go, prints the error and ends the process, with code 1.

    Args:
        channels: Of this rank's pipeline, beside the groups that the process is in.
        error: What ended the run; None: another rank's failure, and the process is not ended here.
    """
    if abort_all(channels, _ABORT_S) or error is None:
        return
    sys.excepthook(type(error), error, error.__traceback__)
    print(  # noqa: T201
        f"lightning_pp: the process is ended, because its device did not release it within {_ABORT_S:.0f} s after the "
        "exception.",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def refuse_aborted_groups() -> None:
    """Raises ``RuntimeError`` where an exception in an earlier run has ended the groups of this process."""
    if are_aborted():
        raise RuntimeError(
            "An exception ended an earlier run in this process, and the communicators of its device with it. No other "
            "run can follow in this process. Start the job again, with ckpt_path= for the last checkpoint."
        )
