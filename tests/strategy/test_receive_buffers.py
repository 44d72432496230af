"""What a rank receives takes memory for as long as it is needed, which more microbatches do not make longer."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.transport.channels import Transport

WIDTH = 64


def most_receive_buffers(schedule: str, num_microbatches: int) -> int:
    """The most tensors that lived at a time in which something was or will be received; in a worker."""
    buffers: list[StorageWeakRef] = []
    most = 0
    post = Transport.post

    def count(self: Transport, stop: Any) -> None:
        nonlocal most
        before = set(self._posted)
        post(self, stop)
        buffers[:] = [buffer for buffer in buffers if not buffer.expired()]
        for tag in self._posted.keys() - before:
            buffers.append(StorageWeakRef(self._posted[tag][1].untyped_storage()))
        most = max(most, len(buffers))

    strategy = PipelineParallelStrategy(2, 1, num_microbatches, schedule=schedule, check_first_batches=False)
    torch.manual_seed(1)
    with patch.object(Transport, "post", count):
        run = trainer(strategy=strategy, max_steps=2)
        run.fit(Blocks(width=WIDTH), loader(4 * num_microbatches, 2 * num_microbatches, WIDTH))
    return most


def count_all(schedules: list[str]) -> dict[str, list[int]]:
    return {name: [most_receive_buffers(name, number) for number in (4, 16)] for name in schedules}


def test_receive_buffers_do_not_grow_with_microbatches(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(count_all, ["1f1b", "zb_v"], world_size=2)):
        few, many = found["1f1b"]
        # those in flight, the one being used, and two ahead
        assert few == many <= 2 - rank + 3
        few, many = found["zb_v"]
        # two microbatches in flight on two stages, each of which receives a value or a gradient; and, as above, three;
        # and the gradient that I leaves for W beside the next microbatch's
        assert few == many <= 2 * 2 + 3 + 1
