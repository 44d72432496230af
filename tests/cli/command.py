"""Runs the command line in a process of its own: started as a user does, or forked from one with torch imported."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from pool import HEAVY_MODULES

import lightning_pp

_SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")

#: A model and a run small enough that a test spends its time on starting processes.
TINY_RUN = [
    "trainer.max_steps=4",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.num_sanity_val_steps=0",
    "trainer.log_every_n_steps=1",
    "model.num_layers=2",
    "model.dim=16",
    "model.num_heads=2",
    "model.max_seq_len=32",
    "data.seq_len=32",
    "data.batch_size=4",
    "data.num_val_crops=4",
    "strategy.num_microbatches=2",
]


@dataclass
class Finished:
    """How a command ended, with its stdout and stderr together."""

    code: int
    output: str


def run_command(
    arguments: list[str],
    folder: Path,
    launcher: tuple[str, ...] = (),
    timeout_s: float = 150.0,
    module: str = "lightning_pp",
) -> Finished:
    """``python -m MODULE ARGUMENTS`` in ``folder``; the whole process group is ended if it hangs."""
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", module, *arguments],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the command did not end within {timeout_s:.0f} s; its output:\n{output}") from None
    return Finished(process.returncode, output)


def run_forked(arguments: list[str], folder: Path, timeout_s: float = 120.0) -> Finished:
    """As :func:`run_command`, without the seconds that importing takes: for commands that launch nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["pool_worker", *HEAVY_MODULES])
    with tempfile.NamedTemporaryFile("r") as output:
        process = context.Process(target=_run_module, args=(arguments, folder, _environment(), output.name))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"the command did not end within {timeout_s:.0f} s; its output:\n{output.read()}")
        assert process.exitcode is not None
        return Finished(process.exitcode, output.read())


def _run_module(arguments: list[str], folder: Path, environment: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = arguments
    runpy.run_module("lightning_pp", run_name="__main__", alter_sys=True)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    package_parent = str(Path(lightning_pp.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "140", "WANDB_SILENT": "true"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return environment


def torchrun(num_processes: int) -> tuple[str, ...]:
    """The launcher for :func:`run_command`."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))
