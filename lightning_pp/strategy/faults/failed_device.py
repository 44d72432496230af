"""After an exception, receives on a device wait for messages that no rank sends any more.

Whoever waits for the device after that waits for ever, be it to free memory or to print the error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from lightning_pp.distributed.groups import abort_all, are_aborted

_ABORT_S = 10.0


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
