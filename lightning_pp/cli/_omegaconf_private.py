"""The private names of OmegaConf that the commands use; nothing else in this layer uses any.

What the installed version lacks is told where it is used.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from lightning_pp._private_names import uses


@uses("omegaconf.DictConfig._get_root")
def root_of(config: DictConfig) -> Any:
    """The whole config that ``config`` is part of."""
    return config._get_root()
