"""``lightning-pp``: compose a config, build what it names, run one Trainer method, print the report.

One run, in order::

    resume           goes on with an earlier run or attempt: its overrides, its folder, its newest checkpoint
    main             ranks other than 0 are told to leave Hydra's folder and log file to rank 0
    Hydra            composes the config; what it refuses is told in a sentence with the closest names. Only then are
                     torch and Lightning imported, which takes seconds
    build            data (files are looked for here, before any process is launched), model, logger, callbacks, Trainer
    Trainer.<mode>   launches the other processes, unless torchrun or a cluster already did
    report           on rank 0: stages, timeline, loss, tokens per second, paths
    close            ends the W&B run, so that the next job of a sweep has one of its own
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_pp.cli import launch
from lightning_pp.cli.hydra_app.application import run_task
from lightning_pp.cli.hydra_app.launcher import Launcher
from lightning_pp.cli.problems import UserError, check_choices, print_problem, refused_by, user_errors
from lightning_pp.versions import answer_version

if TYPE_CHECKING:
    from lightning_pp.cli.run import Run

_COMMAND = "lightning-pp"


def main() -> None:
    """Entry point of the command."""
    sys.path.insert(0, os.getcwd())  # modules in the user's own folder are found, as with `python -m`
    answer_version(sys.argv[1:], _COMMAND)
    with refused_by(_COMMAND):
        check_choices(sys.argv[1:])
        if launch.launched_from_outside() or any(each.startswith("resume=") for each in sys.argv):
            from lightning_pp.cli.resume import with_what_it_resumes

            sys.argv[1:] = with_what_it_resumes(sys.argv[1:])
    run_task(_task, "pkg://lightning_pp.conf", "config", "1.3", _COMMAND)


def _task(config: DictConfig) -> None:
    from lightning_pp.cli.resume import remember_folder
    from lightning_pp.cli.run import Run, hide_saved_secrets

    if launch.is_rank_zero():
        hide_saved_secrets()
    run: Run | None = None
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        remember_folder(HydraConfig.get().runtime.output_dir)
    try:
        _refuse_self_launched_sweep(config)
        with user_errors():
            if Run.has_ended(config):
                return
            run = Run.build(config)
        run.execute()
        run.report()
        run.close()
    except BaseException as error:
        if isinstance(error, UserError):
            print_problem(error)
            if run is None and Launcher.new_folder is not None:
                _remove_what_hydra_wrote(Launcher.new_folder)
        if run is not None:
            run.close(failed=True)
            launch.end_children(run.trainer)
        if isinstance(error, UserError):
            sys.exit(1)
        raise


def _remove_what_hydra_wrote(folder: Path) -> None:
    """A run that was refused leaves no folder, and no empty one of its day."""
    if {path.name for path in folder.glob("*")} <= {".hydra", f"{HydraConfig.get().job.name}.log"}:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for parent in list(folder.parents)[:2]:
                parent.rmdir()


def _refuse_self_launched_sweep(config: DictConfig) -> None:
    """Lightning's launcher re-executes the command line, so each child of a sweep would start the sweep again."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN or launch.launched_from_outside():
        return
    num_processes = launch.num_processes_wanted(config.trainer)
    if num_processes == 1:
        return
    raise UserError(
        f"--multirun cannot start {num_processes} processes by itself: each of them would start the whole sweep.\n"
        "Have torchrun start them, by launcher=torchrun or by hand:\n"
        f"  {launch.torchrun_command(num_processes, sys.argv[1:])}"
    )
