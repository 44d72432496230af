"""The command line: compose a config with Hydra, build the Trainer, run, report."""

from __future__ import annotations

from lightning_pp.cli.app import main

__all__ = ["main"]
