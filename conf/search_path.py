"""Puts the groups and recipes of this package on the search path of every Hydra application that imports it."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

PLACES = ("pkg://lightning_pp.conf", "pkg://lightning_pp.recipes")


class LightningPPSearchPath(SearchPathPlugin):
    """Adds :data:`PLACES` behind the application's own folder, so that the application's options come first.

    It is registered when :mod:`lightning_pp.conf` is imported, and lies in no ``hydra_plugins`` folder: applications
    that do not import the package find nothing of it.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes."""
        known = {element.path for element in search_path.get_path()}
        for place in PLACES:
            if place not in known:
                search_path.append("lightning_pp", place)


def register_search_path() -> None:
    """Has Hydra ask :class:`LightningPPSearchPath`."""
    Plugins.instance().register(LightningPPSearchPath)
