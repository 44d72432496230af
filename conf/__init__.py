"""Hydra configuration: the typed schema and the config groups, each valid alone.

Importing this package puts the schema into Hydra's ConfigStore. A Hydra application of your own uses the groups with::

    import lightning_pp.conf

and, in its primary config, ``hydra.searchpath: [pkg://lightning_pp.conf, pkg://lightning_pp.recipes]``.
"""

from __future__ import annotations

from lightning_pp.conf.schema import Mode, RunConf, register
from lightning_pp.conf.targets import build

__all__ = ["Mode", "RunConf", "build", "register"]

register()
