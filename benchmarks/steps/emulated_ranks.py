"""The set-up that benchmarks of emulated pipelines share: a process for each rank, and the rows that are measured."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from emulated_runs import sleep_precisely
from torch.multiprocessing.spawn import spawn

Row = dict[str, Any]


def rows_of_ranks(run_rank: Callable[..., Iterable[Any]], num_ranks: int, options: Any) -> list[Row]:
    """The fields of the dataclasses that ``run_rank(rank, num_ranks, options)`` returns on rank 0.

    Each rank is a process with one thread that wakes in time from its sleeps, and finds in its environment what
    ``torchrun`` would have put there.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        port = random.SystemRandom().randrange(15000, 32000)
        spawn(_run, (run_rank, num_ranks, options, port, path), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        rows: list[Row] = json.loads(path.read_text())
        return rows


def _run(
    rank: int, run_rank: Callable[..., Iterable[Any]], num_ranks: int, options: Any, port: int, path: Path
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", TORCHELASTIC_RUN_ID="emulated",
    )  # fmt: skip
    torch.set_num_threads(1)
    sleep_precisely()
    rows = run_rank(rank, num_ranks, options)
    if rank == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))


def table_row(cells: Iterable[str]) -> str:
    """A row of a table, in Markdown."""
    return f"| {' | '.join(cells)} |"


def print_heading(columns: Sequence[str]) -> None:
    """The head of a table."""
    print(f"{table_row(columns)}\n|{'---|' * len(columns)}", flush=True)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows with the version of torch that they were measured with."""
    path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
