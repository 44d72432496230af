"""Puts the groups and recipes of this package on the search path of every Hydra application that imports it."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

_PACKAGE = Path(__file__).resolve().parents[1]


def yaml_folders() -> tuple[Path, Path]:
    """The folders of the groups (``conf``) and of the recipes (``recipes``), both absolute.

    A wheel has them within the package. A source tree has them beside it, whether it is installed in place
    (``pip install -e .``) or only on the path.

    Raises:
        FileNotFoundError: They are in neither place: the installation is not whole.
    """
    for root in (_PACKAGE, _PACKAGE.parent):
        conf, recipes = root / "conf", root / "recipes"
        if (conf / "config.yaml").is_file() and (recipes / "recipe").is_dir():
            return conf, recipes
    raise FileNotFoundError(
        f"The config groups of lightning_pp are neither in {_PACKAGE / 'conf'} nor in {_PACKAGE.parent / 'conf'}: "
        "its installation is not whole. Install it again."
    )


class LightningPPSearchPath(SearchPathPlugin):
    """Adds :func:`yaml_folders` behind the application's own folder, so that the application's options come first.

    It is registered when :mod:`lightning_pp.conf` is imported, and lies in no ``hydra_plugins`` folder: applications
    that do not import the package find nothing of it. ``pkg://lightning_pp.conf``, which the commands of this package
    name as their primary source, holds YAML in a wheel alone; in a source tree all is found in these folders.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes."""
        known = {element.path for element in search_path.get_path()}
        for folder in yaml_folders():
            place = f"file://{folder}"
            if place not in known:
                search_path.append("lightning_pp", place)


def register_search_path() -> None:
    """Has Hydra ask :class:`LightningPPSearchPath`."""
    Plugins.instance().register(LightningPPSearchPath)
