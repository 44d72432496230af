"""The launcher of this process, and what only rank 0 may do."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_GLOBAL_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK")
_CHILD_GRACE_SECONDS = 5.0
#: Set for processes that are started with the command line of this one, which says already where the run goes on.
DECIDED = "LIGHTNING_PP_RESUME_DECIDED"


def global_rank() -> int:
    """Rank that the launcher gave this process; 0 where there was no launcher.

    A child of Lightning's own launcher knows only its local rank, which stands for the global one here: all that is
    asked of it is whether it is rank 0.
    """
    for variable in _GLOBAL_RANK_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return local_rank or int(os.environ.get("NODE_RANK", "0"))


def is_rank_zero() -> bool:
    """Whether this process prints, logs and owns Hydra's output folder."""
    return global_rank() == 0


def launched_from_outside() -> bool:
    """Whether torchrun or a cluster started this process (Lightning then starts no others)."""
    return "LOCAL_RANK" in os.environ or any(variable in os.environ for variable in _GLOBAL_RANK_VARIABLES)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of the command line, and its overrides."""
    overrides = [a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))]
    return [a for a in arguments if a not in overrides], overrides


def arguments_of_this_rank(arguments: Sequence[str]) -> list[str]:
    """The command line, with what keeps every rank but 0 from making an output folder or a log file of its own.

    Nothing is lost: Lightning broadcasts rank 0's checkpoint and log folders.
    """
    # Hydra refuses overrides on both sides of an option, and Lightning's launcher appends some for its children
    options, overrides = split_overrides(arguments)
    if is_rank_zero() or any(argument in ("-h", "--help", "--version", "-i", "--info") for argument in arguments):
        return [*options, *overrides]
    quiet = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    if not any(argument.startswith("hydra.run.dir=") for argument in arguments):
        # Hydra writes a multirun.yaml whatever it is told: let it, where nobody looks.
        sweep_folder = tempfile.gettempdir()
        quiet += ["hydra.run.dir=.", f"hydra.sweep.dir='{sweep_folder}'", "hydra.sweep.subdir=."]
    return [*options, *overrides, *quiet]


def num_processes_wanted(trainer_config: Any) -> int:
    """Processes that ``trainer.devices`` and ``trainer.num_nodes`` ask for; ``auto`` counts as more than one."""
    devices = trainer_config.devices
    if isinstance(devices, str) and devices.strip().isdigit():
        devices = int(devices)
    if isinstance(devices, int) and devices >= 0:
        per_node = devices
    elif isinstance(devices, (str, int)):  # "auto", "0,1" or -1: all there are
        per_node = len(devices.split(",")) if isinstance(devices, str) and "," in devices else _num_visible_devices()
    else:
        per_node = len(devices)
    return int(per_node * trainer_config.num_nodes)


def _num_visible_devices() -> int:
    import torch  # only now: it is slow to import

    return max(1, torch.cuda.device_count())


def share_cores(num_processes: int) -> None:
    """Give each of a machine's processes its share of the cores, unless ``OMP_NUM_THREADS`` says otherwise.

    Lightning does so for rank 0 only: its children would each use every core, and waiting threads that spin would take
    the cores from those that work.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, num_cores // num_processes)
    import torch

    torch.set_num_threads(num_threads)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # which the children inherit


def torchrun_options(launcher: Any, trainer_config: Any) -> list[str]:
    """What torchrun is given on this node for ``launcher=torchrun``.

    Args:
        launcher: What the group gives, with the fields of ``TorchrunConf``.
        trainer_config: Whose ``devices`` and ``num_nodes`` count.

    Raises:
        ValueError: There are several nodes, and no place where they meet.
    """
    num_nodes = int(trainer_config.num_nodes)
    options = [f"--nproc-per-node={num_processes_wanted(trainer_config) // num_nodes}"]
    options.append(f"--max-restarts={launcher.max_restarts}")
    if num_nodes == 1:
        return [*options, "--standalone", *launcher.options]
    if launcher.rdzv_endpoint is None:
        raise ValueError(
            f"launcher=torchrun with trainer.num_nodes={num_nodes} needs launcher.rdzv_endpoint=HOST:PORT, the same on "
            "all nodes. HOST is one of the nodes, and PORT a free port on it."
        )
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={launcher.rdzv_endpoint}", f"--rdzv-id={launcher.rdzv_id}"]
    return [*options, f"--nnodes={num_nodes}", *meeting, *launcher.options]


def torchrun_command(num_processes: int, arguments: Sequence[str]) -> str:
    """The same run, started by torchrun."""
    return f"torchrun --nproc-per-node {num_processes} -m lightning_pp {shlex.join(arguments)}".rstrip()


def end_children(trainer: Trainer) -> None:
    """End the processes that Lightning launched from this one: they wait for a rank that has failed."""
    children = getattr(trainer.strategy.launcher, "procs", [])
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _CHILD_GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
