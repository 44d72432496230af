"""The private names of OmegaConf that the commands use; nothing else in this layer uses any.

Tried with OmegaConf 2.3. Importing fails, and says which name is missing, where a version has one no longer.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from lightning_pp._private_names import private

private(DictConfig, "_get_root", of="omegaconf", tried="2.3")


def root_of(config: DictConfig) -> Any:
    """The whole config that ``config`` is part of."""
    return config._get_root()
