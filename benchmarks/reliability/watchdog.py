"""What the threads that watch other ranks cost a rank: ``python benchmarks/reliability/watchdog.py [--ranks 8]``.

Processes on this host join a store and watch each other while their main threads sleep. Printed is the processor time
that a second of watching takes, the median over the ranks, beside the same processes without watching.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so
from torch.multiprocessing.spawn import spawn

from lightning_pp.distributed.watch.table import Table
from lightning_pp.distributed.watch.this_rank import Position, Progress, Stack, ThisRank
from lightning_pp.distributed.watch.watchdog import Watchdog

SECONDS = 10.0


def watch(rank: int, num_ranks: int, port: int, watches: bool, used: Any, pids: Any) -> None:
    """The life of one process."""
    store: Any = TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)  # barrier() is not in torch's stubs
    pids[rank] = os.getpid()
    store.barrier("joined", num_ranks)
    others = {other: pid for other, pid in enumerate(pids) if other != rank}
    watchdog = None
    if watches:
        this_rank = ThisRank(
            rank,
            num_ranks,
            place=str,
            position=lambda: Position("the start", "", 0),
            progress=lambda: [Progress("training", 0, 1, False), Progress("validation", 0, 0, False)],
            stack=lambda: Stack(waits=True, lines=()),
            wake=lambda: None,
            exit_codes=dict,
            timeout_s=1800.0,
            deadlock_s=60.0,
        )
        watchdog = Watchdog(Table.of_job(store, 0, num_ranks, rank), this_rank, others, store_is_of_rank_0=True)
    time.sleep(1)
    start, cpu = time.perf_counter(), time.process_time()
    time.sleep(SECONDS)
    used[rank] = (time.process_time() - cpu) / (time.perf_counter() - start)
    time.sleep(1)
    if watchdog is not None:
        watchdog.end()


def main() -> None:
    """Prints a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    for num_ranks in parser.parse_args().ranks:
        medians = []
        for watches in (False, True):
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            context = multiprocessing.get_context("spawn")
            used: Any = context.Array("d", num_ranks)
            pids = context.Array("l", num_ranks)
            port = store.port
            del store
            spawn(watch, (num_ranks, port, watches, used, pids), num_ranks)  # type: ignore[no-untyped-call]
            medians.append(statistics.median(used))
        without, with_threads = (1e3 * second for second in medians)
        print(f"{num_ranks} ranks: {with_threads:.2f} ms of processor time a second, {without:.2f} ms without watching")


if __name__ == "__main__":
    main()
