"""Facts of a run for its loggers: versions and the commit."""

from __future__ import annotations

import platform
import subprocess
import sys
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_pp.planning.hardware.devices import dtype_of_precision

_PACKAGES = ("lightning", "transformers", "wandb")
_GIT_SECONDS = 5.0


def run_facts() -> dict[str, str]:
    """Versions by name, and ``git_commit`` if the run was started in a repository."""
    package = sys.modules["lightning_pp"]
    facts = {
        "version_python": platform.python_version(),
        "version_torch": str(torch.__version__),
        "version_lightning_pp": package.__version__,
    }
    if torch.version.cuda is not None:
        facts["version_cuda"] = torch.version.cuda
    for name in _PACKAGES:
        try:
            facts[f"version_{name}"] = version(name)
        except PackageNotFoundError:
            continue
    commit = _git_commit()
    return facts if commit is None else {**facts, "git_commit": commit}


def _git_commit() -> str | None:
    """The commit checked out here, with ``-dirty`` if tracked files have changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def known_peak_tflops(device: torch.device, trainer: pl.Trainer) -> float | None:
    """Peak of ``device`` in the trainer's precision by Lightning's table, TFLOP/s; None if unknown.

    Lightning raises or warns for unknown devices; both are suppressed.
    """
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        flops = get_available_flops(device, dtype_of_precision(trainer.precision))
        return None if flops is None else flops / 1e12
    return None
