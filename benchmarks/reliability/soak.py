"""A training that fails again and again, restarted by torchrun, against one that never does: the same weights?

    python benchmarks/reliability/soak.py --steps 3000 --faults 30

trains a small GPT as a pipeline of two processes, under ``torchrun --max-restarts``. At random steps a random rank
raises an exception, is killed, or calls ``exit(0)``. Checkpoints are written every 50 steps. Then the same is trained
without faults. Weights and optimizer states of the two last checkpoints, and the logged losses of all steps, are
compared bit for bit. With ``--nodes 2`` two ``torchrun``, each with two processes, take the place of two nodes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch

KINDS = ("exception", "SIGKILL", "exit(0)")
PROCESSES_PER_NODE = 2
TIMEOUT_S = 3600.0


class Faults(pl.Callback):
    """Fails at the beginning of a batch, each time once in the whole job.

    Args:
        folder: Where a file for each fault says that it has been; it holds this process's memory at its peak, in KiB.
        planned: Optimizer steps, kinds and ranks of the faults, by step.
    """

    def __init__(self, folder: str, planned: str) -> None:
        self.folder = Path(folder)
        self.planned: list[tuple[int, str, int]] = json.loads(planned)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for number, (step, kind, rank) in enumerate(self.planned):
            been = self.folder / f"fault-{number}"
            if trainer.global_step == step and trainer.global_rank == rank and not been.exists():
                been.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
                if kind == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "exit(0)":
                    sys.exit(0)
                raise ValueError(f"fault {number}")


def plan_faults(num_steps: int, num_faults: int, seed: int, num_ranks: int) -> list[tuple[int, str, int]]:
    """Kinds come in turn, so that a few faults are of all kinds; steps are spread, ranks random."""
    draw = random.Random(seed)
    every = num_steps // (num_faults + 1)
    return [
        (number * every + draw.randrange(every) + 1, KINDS[number % len(KINDS)], draw.randrange(num_ranks))
        for number in range(num_faults)
    ]


def train(
    folder: Path,
    name: str,
    num_steps: int,
    save_every: int,
    planned: list[Any],
    num_nodes: int = 1,
    backend: str = "c10d",
) -> tuple[str, float]:
    """Runs the command under torchrun, once for each node; returns what they printed, and their seconds.

    Raises:
        RuntimeError: One of them failed.
    """
    started = time.monotonic()
    agents = start(folder, name, num_steps, save_every, planned, num_nodes, backend)
    try:
        codes = [agent.wait(max(1.0, started + TIMEOUT_S - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    printed = "".join((folder / f"{name}-{number}.log").read_text() for number in range(num_nodes))
    if any(codes):
        raise RuntimeError(f"the run ended with {codes}:\n{printed[-20000:]}")
    return printed, time.monotonic() - started


def start(
    folder: Path, name: str, num_steps: int, save_every: int, planned: list[Any], num_nodes: int, backend: str
) -> list[subprocess.Popen[bytes]]:
    """Starts a torchrun for each node, in a session of its own; each writes ``NAME-NODE.log`` in ``folder``."""
    command = ["-m", "lightning_pp", f"hydra.run.dir={name}", "logger=csv"]
    command += [f"trainer.max_steps={num_steps}", f"callbacks.checkpoint.every_n_train_steps={save_every}"]
    command += ["trainer.limit_val_batches=0", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1"]
    command += ["strategy.schedule=1f1b", f"trainer.num_nodes={num_nodes}", f"trainer.devices={PROCESSES_PER_NODE}"]
    command += [f"strategy.num_microbatches={PROCESSES_PER_NODE * num_nodes}", "data.batch_size=4", "model.dim=16"]
    command += [f"model.num_layers={PROCESSES_PER_NODE * num_nodes}", "model.num_heads=2", "model.max_seq_len=32"]
    command += ["model.dropout=0.1", "data.seq_len=32", "data.num_train_crops=260", "data.num_val_crops=4"]
    command += ["+callbacks.faults._target_=soak.Faults", f"+callbacks.faults.folder='{folder}'"]
    command += [f"+callbacks.faults.planned='{json.dumps(planned)}'"]
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["LIGHTNING_PP_ALLOWED_PACKAGES"] = "soak"  # this file
    environment["LOGLEVEL"] = "INFO"  # of torchrun, which then tells of its restarts
    agents = []
    for number, torchrun in enumerate(torchruns(num_nodes, len(planned) + 3, backend)):
        with (folder / f"{name}-{number}.log").open("w") as log:
            agents.append(
                subprocess.Popen(
                    [*torchrun, *command],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return agents


def torchruns(num_nodes: int, max_restarts: int, backend: str = "c10d") -> list[list[str]]:
    """The command of each node's torchrun, without what it runs; the first node has the store."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES_PER_NODE)]
    command += ["--max-restarts", str(max_restarts)]
    if num_nodes == 1:
        return [[*command, "--standalone"]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command += ["--nnodes", str(num_nodes)]
    if backend == "static":
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [[*command, "--node-rank", str(number)] for number in range(num_nodes)]
    command += ["--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"soak-{port}"]
    command += ["--local-addr", "127.0.0.1"]
    return [[*command, "--rdzv-conf", f"is_host={int(number == 0)}"] for number in range(num_nodes)]


def losses(run: Path) -> dict[int, float]:
    """The last that was logged for each step; what came after the checkpoint that is gone on from is logged again."""
    (file,) = run.glob("csv/*/metrics.csv")
    with file.open() as stream:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(stream) if row["train_loss"]}


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def soak(
    folder: Path, num_steps: int, num_faults: int, save_every: int, seed: int = 0, num_nodes: int = 1
) -> dict[str, Any]:
    """Trains twice in ``folder``, with and without faults; returns figures and whether the two are equal."""
    planned = plan_faults(num_steps, num_faults, seed, PROCESSES_PER_NODE * num_nodes)
    return soak_with(folder, num_steps, planned, save_every, num_nodes)


def soak_with(
    folder: Path,
    num_steps: int,
    planned: list[tuple[int, str, int]],
    save_every: int,
    num_nodes: int = 1,
    backend: str = "c10d",
) -> dict[str, Any]:
    """As :func:`soak`, with these faults: optimizer steps, kinds and ranks."""
    from lightning_pp.checkpoint.reading.open import read_alone

    printed, seconds = train(folder, "faulty", num_steps, save_every, planned, num_nodes, backend)
    _, undisturbed = train(folder, "undisturbed", num_steps, save_every, [], num_nodes, backend)
    last = f"checkpoints/step{num_steps}.ckpt"
    faulty, whole = (read_alone(folder / name / last) for name in ("faulty", "undisturbed"))
    from_steps = [int(step) for step in re.findall(r"lightning-pp: attempt .* \(step (\d+)\)", printed)]
    been = sorted(folder.glob("fault-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    peaks = [int(path.read_text()) / 1024 for path in been]
    return {
        "steps": num_steps,
        "faults": len(been),
        "by kind": {kind: sum(each[1] == kind for each in planned[: len(been)]) for kind in KINDS},
        "attempts that went on": len(from_steps),
        "steps done again": sum(step for step, _, _ in planned) - sum(from_steps),
        "seconds": round(seconds),
        "seconds without faults": round(undisturbed),
        "MiB at peak, first and last attempt": [round(peaks[0]), round(peaks[-1])],
        "checkpoints left": len(list((folder / "faulty" / "checkpoints").glob("step*.ckpt"))),
        "losses equal": losses(folder / "faulty") == losses(folder / "undisturbed"),
        "steps logged": len(losses(folder / "undisturbed")),
        "equal": all(same(faulty[key], whole[key]) for key in ("state_dict", "optimizer_states", "lr_schedulers")),
    }


def main() -> None:
    """Parse the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        figures = soak(Path(folder), asked.steps, asked.faults, asked.save_every, asked.seed, asked.nodes)
    for name, figure in figures.items():
        print(f"{name:<40}{figure}")
    sys.exit(0 if figures["equal"] and figures["losses equal"] and figures["faults"] == asked.faults else 1)


if __name__ == "__main__":
    main()
