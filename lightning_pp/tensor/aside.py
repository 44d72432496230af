"""Communication of a backward, with deferred weight gradients beside it.

A collective is started, products are computed that take about as long, and then it is waited for. How many FLOPs a
device does while its tensor group communicates a byte is measured once, in the first backward. All ranks of a group
then decide alike, so a weight that all of them hold whole gets the same sum on each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[..., Any]

# what was measured, by tensor group
FLOPS_PER_BYTE: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()


class _Beside:
    """``run`` computes about the given number of FLOPs of deferred gradients; set while a backward defers."""

    run: Callable[[float], None] | None = None


BESIDE = _Beside()


def aside(collective: Collective) -> Collective:
    """``collective`` of :mod:`torch.distributed`, for a backward: with weight gradients beside it, if any wait.

    Not with deterministic algorithms: how many run beside it is measured, and sums of microbatches change their order.
    """
    if BESIDE.run is None or torch.are_deterministic_algorithms_enabled():
        return collective
    return partial(_run_aside, collective, BESIDE.run)


def _run_aside(collective: Collective, run: Callable[[float], None], *tensors: Any, group: dist.ProcessGroup) -> None:
    # a sum goes round twice: it is scattered, and gathered
    whole = next((each for each in tensors if isinstance(each, list)), tensors[:1] * 2)
    if (rate := FLOPS_PER_BYTE.get(group)) is None:
        rate = FLOPS_PER_BYTE[group] = _measured_rate(group, whole[0])
    work = collective(*tensors, group=group, async_op=True)
    run(rate * sum(each.nbytes for each in whole))
    work.wait()


def _measured_rate(group: dist.ProcessGroup, like: Tensor) -> float:
    """FLOPs of a product that takes as long as a byte goes round in ``group``; the same on all its ranks."""
    width = 4096 if like.is_cuda else 256
    matrix = like.new_zeros(width, width)

    def seconds(run: Callable[[], Any]) -> float:
        marks = []
        for _ in range(7):
            run()
            if like.is_cuda:
                torch.cuda.synchronize(like.device)
            marks.append(time.perf_counter())
        return median(stop - start for start, stop in pairwise(marks))

    flops_per_s = 2 * width**3 / seconds(lambda: torch.mm(matrix, matrix))
    seconds_per_byte = seconds(lambda: dist.all_reduce(matrix, group=group)) / (2 * matrix.nbytes)
    rate = torch.tensor(flops_per_s * seconds_per_byte, device=like.device)
    dist.all_reduce(rate, dist.ReduceOp.MIN, group=group)
    return rate.item()
