"""Hydra configuration: the typed schema, where the config groups (``conf/``, each valid alone) are, and building.

Importing this package puts the schema into Hydra's ConfigStore and the groups on Hydra's search path. A Hydra
application of your own uses them after::

    import lightning_pp.conf
"""

from __future__ import annotations

from lightning_pp.conf.schema import Mode, RunConf, register
from lightning_pp.conf.search_path import register_search_path
from lightning_pp.conf.targets import build

__all__ = ["Mode", "RunConf", "build", "register"]

register()
register_search_path()
