"""The launcher: starts the processes of a run of the trainer, and notes what the user has passed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy._lightning_private import SubprocessScriptLauncher


class RunLauncher(SubprocessScriptLauncher):
    """Starts the other processes of this node unless a launcher has, and notes arguments of ``fit`` and its siblings.

    Lightning 2.6 passes ``weights_only`` to strategies that restore before ``setup`` only, and sets
    ``trainer.ckpt_path`` after it. A strategy that restores afterwards can know them from the arguments of the run,
    which are the launcher's too.

    Attributes:
        weights_only: What the user passed to the run under way; None if nothing.
        ckpt_path: The same.
        when_done: Called when a run has ended without an exception, after all hooks.
        explain: Called with an error of Python or torch that ends a run; may add to it, or raise another in its place.
    """

    weights_only: bool | None = None
    ckpt_path: str | Path | None = None
    when_done: Callable[[], None] | None = None
    explain: Callable[[KeyError | RuntimeError], None] | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Where it is not, :meth:`check_program` has said so, and what does work; Lightning's advice would not."""
        return True

    def check_program(self) -> None:
        """Raises :class:`ConfigurationError` if other processes are to be started, and have no file to run."""
        num_others = self.num_processes * self.num_nodes - 1
        has_module = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
        has_program = not hasattr(sys, "ps1") and (has_module or Path(sys.argv[0]).is_file())
        if self.cluster_environment.creates_processes_externally or num_others == 0 or has_program:
            return
        where = "a notebook or an interactive Python" if hasattr(sys, "ps1") else "code without a file"
        raise ConfigurationError(
            f"{num_others + 1} processes cannot be started from {where}: each of them runs the program's file from its "
            "beginning. Save the code as train.py (in a notebook: %%writefile train.py) and run python train.py (in a "
            "notebook: !python train.py). Trainer(devices=1) works here."
        )

    def arguments_of_others(self) -> list[str]:
        """In a Hydra application the other processes write no log file; overrides stand last, as Hydra wants them."""
        arguments = sys.argv[1:]
        hydra = sys.modules.get("hydra.core.hydra_config")  # importing it takes 70 ms
        if hydra is None or not hydra.HydraConfig.initialized():
            return arguments
        options = [each for each in arguments if each.startswith("-") or not ("=" in each or each.startswith("~"))]
        overrides = [each for each in arguments if each not in options]
        quiet = [f"hydra/{log}=none" for log in ("job_logging", "hydra_logging")]
        return [*options, *overrides, *(each for each in quiet if each not in overrides)]

    def exit_codes(self) -> dict[int, int]:
        """Local rank to exit code of the processes that this one has started and that have ended."""
        return {place: code for place, process in enumerate(self.procs, 1) if (code := process.poll()) is not None}

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function``, in as many processes as the job has."""
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        self.weights_only, self.ckpt_path = arguments.get("weights_only"), arguments.get("ckpt_path")
        if not self.cluster_environment.creates_processes_externally:
            function = partial(super().launch, function, trainer=trainer)
        try:
            result = function(*args, **kwargs)
        except (KeyError, RuntimeError) as error:
            if self.explain is not None:
                self.explain(error)
            raise
        if self.when_done is not None:
            self.when_done()
        return result
