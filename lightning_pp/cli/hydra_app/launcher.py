"""``launcher=torchrun``: the command turns into torchrun, which starts it again, once for each device.

Hydra tells when it has composed, before it makes an output folder: by a callback, which the primary config names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_pp.cli import launch
from lightning_pp.cli.problems import UserError, print_problem


class Launcher(Callback):
    """Replaces this process by the launcher of the config. ``new_folder``: Hydra's folder, if it is new."""

    new_folder: ClassVar[Path | None] = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a run; Hydra calls it."""
        folder = Path(config.hydra.run.dir)
        Launcher.new_folder = folder.absolute() if launch.is_rank_zero() and not folder.exists() else None
        _launch(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a sweep: torchrun starts it as a whole; Hydra calls it."""
        _launch(config)


def _launch(config: DictConfig) -> None:
    name = None if config.launcher is None else config.launcher.name
    if name in (None, "local") or launch.launched_from_outside():
        return
    try:
        if name != "torchrun":
            raise UserError(f"launcher.name={name} is not known. Choose local or torchrun.")
        options = launch.torchrun_options(config.launcher, config.trainer)
    except (UserError, ValueError) as error:  # an exception that leaves a callback is a warning of Hydra's
        print_problem(UserError(str(error)))
        sys.exit(1)
    launch.share_cores(launch.num_processes_wanted(config.trainer) // config.trainer.num_nodes)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "lightning_pp", *sys.argv[1:]]
    os.environ.pop(launch.DECIDED, None)  # an attempt after the first decides anew
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
