"""The process of a rank in a check."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_pp.distributed.loopback import keep_gloo_on_loopback
from lightning_pp.doctor.checks import all_checks
from lightning_pp.doctor.findings import Rank
from lightning_pp.doctor.sharing import limit_memory

Prepare = Callable[[str], None]
"""Called in each process of a check with the check's title before it runs: for tests, which plant faults with it."""


LONGEST_S = 175.0


@dataclass(frozen=True)
class Options:
    """What is asked of the doctor.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        only: Names or titles of checks; empty for all.
        is_quick: Whether checks do less.
        longest_s: Seconds after which no check begins any more.
        limit_s: The most seconds of one check, where that is less than its own limit.
        prepare: Called in each process of a check before it, with the check's title.
    """

    device_type: str = "cpu"
    only: Sequence[str] = ()
    is_quick: bool = False
    longest_s: float = LONGEST_S
    limit_s: float = float("inf")
    prepare: Prepare | None = None


def run_check(title: str, options: Options, folder: Path, shares_device: bool, note: Callable[[str], None]) -> object:
    """Runs a check on the rank that the environment says.

    Args:
        title: Of the check.
        options: What is asked of the doctor.
        folder: One that all ranks of the check see.
        shares_device: Whether all ranks are on one device.
        note: Tells what is done now.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as the strategy does, before CUDA starts
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    if here == num_ranks:
        keep_gloo_on_loopback()
    device = torch.device("cpu")
    if options.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        if shares_device:
            limit_memory(device, num_ranks)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (num_ranks if shares_device else here)))
    check = next(check for check in all_checks() if check.title == title)
    if options.prepare is not None:
        options.prepare(title)
    rank = Rank(int(os.environ["RANK"]), num_ranks, here, device, options.is_quick, folder, note)
    return check.run(rank, **check.arguments)
