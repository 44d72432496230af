"""The private names of OmegaConf that the commands use; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from lightning_pp._private_names import uses


@uses("omegaconf.DictConfig._get_root")
def root_of(config: DictConfig) -> Any:
    """The whole config that ``config`` is part of."""
    return config._get_root()
