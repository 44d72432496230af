"""Hydra applications: how they start on every rank, what they answer without a run, and how they refuse an override."""

from __future__ import annotations

from lightning_pp.cli.hydra_app.application import hydra_main

__all__ = ["hydra_main"]
