"""``lightning-pp-data``: text to a folder of tokens."""

from __future__ import annotations

from lightning_pp.cli.data.command import main

__all__ = ["main"]
