"""``lightning-pp-export``: a checkpoint as files that others read."""

from __future__ import annotations

from lightning_pp.cli.export.command import main

__all__ = ["main"]
