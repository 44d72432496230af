"""What a fault on one of two ranks comes to, in a pipeline and under DDP: ``benchmarks/reliability/faults.py``.

Each job is two processes on this host that train the same small module; rank 1 (rank 0 for ``exit(0)``) meets the fault
after three batches. Printed are the exit codes, the seconds from the fault to the end of the last process, and how many
of the ranks name the rank that failed. A job that has not ended after ``--longest`` seconds is ended by force.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.extend(sorted({str(path.parent) for path in (Path(__file__).parents[2] / "tests").rglob("*.py")}))

from faulty_job import serve

LAYOUTS = {"lightning_pp": ("1f1b", 2, 1), "DDP": ("none", 1, 2)}
FAULTS = {
    "an exception in the forward": ("exception", "forward", 1),
    "an exception in the loader": ("exception", "loading", 1),
    "an exception in a callback": ("exception", "callback", 1),
    "SIGKILL in the forward, as by the kernel when memory is short": ("SIGKILL", "forward", 1),
    "SIGSTOP in the forward": ("SIGSTOP", "forward", 1),
    "exit(0) on rank 0": ("exit(0)", "optimizer", 0),
    "a loss that is NaN": ("NaN", "forward", 1),
    "half of the data on rank 1": ("short data", "none", 1),
}


def described(results: Sequence[dict[str, Any]], rank: int) -> str:
    """One cell of the table, from several runs of one job."""
    last = results[-1]
    if last["left"]:
        return f"ranks {last['left']} still there at the end of the watch"
    codes = ", ".join(str(code) for code in last["codes"])
    named = sum(bool(re.search(rf"rank {rank}\b", _lines(text))) for text in last["texts"])
    seconds = [result["since_fault"] for result in results if result["since_fault"] is not None]
    when = f" {statistics.median(seconds):.1f} s;" if seconds else ""
    return f"codes {codes};{when} named by {named} of {len(last['texts'])}"


def _lines(text: str) -> str:
    """What a rank has printed, but for the line of its start that tells its own number."""
    return "\n".join(line for line in text.splitlines() if "GLOBAL_RANK" not in line)


def main() -> None:
    """Prints a row for each fault, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=float, default=60.0, help="seconds that a job is watched")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each job that ends by itself")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    connection, child = context.Pipe()
    process = context.Process(target=serve, args=(child,))  # runs jobs, as it has imported what they need
    process.start()
    child.close()

    def run(job: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            connection.send((job, Path(folder)))
            answer: dict[str, Any] = connection.recv()
            return answer

    print("| fault |", " | ".join(LAYOUTS), "|", flush=True)
    print("|---|" + "---|" * len(LAYOUTS))
    for name, (fault, place, rank) in FAULTS.items():
        cells = []
        for layout in LAYOUTS.values():
            job = {"layout": layout, "fault": fault, "place": place, "rank": rank, "timeout": 1800}
            job["longest"] = options.longest
            results = [run(job)]
            while not results[-1]["left"] and len(results) < options.repeats:
                results.append(run(job))
            cells.append(described(results, rank))
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
    connection.close()
    process.join(30)


if __name__ == "__main__":
    main()
