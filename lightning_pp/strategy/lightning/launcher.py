"""The launcher: what Lightning gives a run of the trainer to, with what the user has passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_pp.strategy._lightning_private import SubprocessScriptLauncher


class RunLauncher(SubprocessScriptLauncher):
    """Starts the other processes of this node, if nobody has, and notes ``weights_only`` of ``fit`` and its siblings.

    Lightning 2.6 passes ``weights_only`` to strategies that restore before ``setup`` only. A strategy that restores
    afterwards can know it from the arguments of the run, which are the launcher's too.

    Attributes:
        weights_only: What the user passed to the run under way; None if nothing.
        when_done: Called when a run has ended without an exception, after all hooks.
    """

    weights_only: bool | None = None
    when_done: Callable[[], None] | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Nothing is started where processes are there already, so a notebook may be one of them."""
        return self.cluster_environment.creates_processes_externally

    def exit_codes(self) -> dict[int, int]:
        """Local rank to exit code of the processes that this one has started and that have ended."""
        return {place: code for place, process in enumerate(self.procs, 1) if (code := process.poll()) is not None}

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function``, in as many processes as the job has."""
        self.weights_only = inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
        if self.cluster_environment.creates_processes_externally:
            result = function(*args, **kwargs)
        else:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        if self.when_done is not None:
            self.when_done()
        return result
