"""The command line: compose a config with Hydra, build the Trainer, run, report."""

from __future__ import annotations

from lightning_pp.cli.app import main
from lightning_pp.cli.hydra_app import hydra_main

__all__ = ["hydra_main", "main"]
