"""``lightning-pp``: compose a config, build what it names, run one Trainer method, print the report.

One run, in order::

    resume           goes on with an earlier run or attempt: its overrides, its folder, its newest checkpoint
    main             ranks other than 0 are told to leave Hydra's folder and log file to rank 0
    Hydra            composes the config; what it refuses is printed with the closest names
    build            data (files are looked for here, before any process is launched), model, logger, callbacks, Trainer
    Trainer.<mode>   launches the other processes, unless torchrun or a cluster already did
    report           on rank 0: stages, timeline, loss, tokens per second, paths
    close            ends the W&B run, so that the next job of a sweep has one of its own
"""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import lightning_pp.conf  # noqa: F401  (importing it registers the schema)
from lightning_pp.cli import launch
from lightning_pp.cli.problems import (
    UserError,
    check_choices,
    explain_override,
    print_problem,
    rank_zero_first,
    user_errors,
)
from lightning_pp.cli.resume import remember_folder, with_what_it_resumes
from lightning_pp.cli.run import Run, hide_saved_secrets


def main() -> None:
    """Entry point of the command."""
    sys.path.insert(0, os.getcwd())  # modules in the user's own folder are found, as with `python -m`
    try:
        check_choices(sys.argv[1:])
        sys.argv[1:] = launch.arguments_of_this_rank(with_what_it_resumes(sys.argv[1:]))
    except UserError as error:
        print_problem(error)
        sys.exit(1)
    with rank_zero_first() as speak_freely:

        @hydra.main(version_base="1.3", config_path="pkg://lightning_pp.conf", config_name="config")
        def task(config: DictConfig) -> None:
            speak_freely()
            if launch.is_rank_zero():
                hide_saved_secrets()
            _run(config)

        try:
            task()
        except SystemExit as stop:
            # Hydra prints what it refuses and exits from inside its handler, so the refused override is in the context.
            explain_override(stop.__context__)
            raise


def _run(config: DictConfig) -> None:
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
        if run is not None:
            run.close(failed=True)
            launch.end_children(run.trainer)
        if isinstance(error, UserError):
            sys.exit(1)
        raise


def _refuse_self_launched_sweep(config: DictConfig) -> None:
    """Lightning's launcher re-executes the command line, so each child of a sweep would start the sweep again."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN or launch.launched_from_outside():
        return
    num_processes = launch.num_processes_wanted(config.trainer)
    if num_processes == 1:
        return
    raise UserError(
        f"--multirun cannot start {num_processes} processes by itself: each would start the whole sweep again.\n"
        "Start them with torchrun:\n"
        f"  {launch.torchrun_command(num_processes, sys.argv[1:])}"
    )
