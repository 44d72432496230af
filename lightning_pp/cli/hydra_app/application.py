"""``hydra.main`` for programs that train in several processes, with one sentence for each refusal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

import lightning_pp.conf  # noqa: F401  (importing it registers the schema and the search path)
from lightning_pp.cli import launch
from lightning_pp.cli.hydra_app.refusals import sentence_for
from lightning_pp.cli.problems import UserError, held_back, print_problem

Task = Callable[[DictConfig], Any]


def hydra_main(
    config_path: str | None = None,
    config_name: str | None = None,
    version_base: str | None = "1.3",
    *,
    command: str | None = None,
) -> Callable[[Task], Callable[[], None]]:
    """A decorator to use instead of ``hydra.main``, with the same arguments.

    It adds:

    - The groups and recipes of this package can be chosen. Those of ``config_path`` come first.
    - Only rank 0 makes an output folder and a log file, under ``torchrun``, on a cluster and with
      ``Trainer(devices=N)``.
    - A refused override gives one sentence with the closest names and options, once for all ranks. The process ends
      with code 1. ``HYDRA_FULL_ERROR=1`` shows Hydra's own traceback.

    Args:
        config_path: As in ``hydra.main``: a folder beside the decorated function's file, or ``pkg://package``.
        config_name: The primary config.
        version_base: As in ``hydra.main``.
        command: First word of messages; by default the name of the program.
    """

    def decorate(task: Task) -> Callable[[], None]:
        @functools.wraps(task)
        def main() -> None:
            run_task(task, config_path, config_name, version_base, command or Path(sys.argv[0]).name)

        return main

    return decorate


def run_task(
    task: Task, config_path: str | None, config_name: str | None, version_base: str | None, command: str
) -> None:
    """Composes the config of this process's command line, and gives it to ``task``.

    Raises:
        SystemExit: The config is refused, or the task has failed.
    """
    arguments = sys.argv[1:]
    sys.argv[1:] = launch.arguments_of_this_rank(arguments)
    with held_back() as held:

        @functools.wraps(task)
        def accepted(config: DictConfig) -> Any:
            held.release()
            return task(config)

        try:
            hydra.main(config_path=config_path, config_name=config_name, version_base=version_base)(accepted)()
        except SystemExit as stop:
            # Hydra prints what it refuses and exits from inside its handler, so the error is in the context.
            if not held.is_let_go and (sentence := sentence_for(stop.__context__, arguments)) is not None:
                held.drop()
                print_problem(UserError(sentence), command)
            raise
