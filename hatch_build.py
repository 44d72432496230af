"""What the metadata of a distribution says of the repository: its addresses, and the links of README.

The address is that of the build: ``REPOSITORY_URL``, or what GitHub Actions sets where it has checked this tree out.
Relative links of README lead there. Without an address they are their text, so that an index shows no dead link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# code comes first, so that brackets in it are no links
_CODE_OR_LINK = re.compile(r"```.*?```|`[^`\n]*`|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.DOTALL)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``; hatchling finds it by its name."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the ``project`` table of pyproject.toml."""
        address, revision = repository(os.environ, Path(self.root))
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(readme, address, revision)}
        metadata["urls"] = urls(address, revision)


def repository(environment: Mapping[str, str], root: Path) -> tuple[str | None, str]:
    """The address of the repository, None where nothing tells it, and the revision that links lead to.

    GitHub's variables are of the repository whose workflow runs. That may be another one, which only installs this.
    """
    address, revision = environment.get("REPOSITORY_URL"), "HEAD"
    workspace = environment.get("GITHUB_WORKSPACE")
    if workspace and Path(workspace).resolve() == root.resolve():
        address = address or f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
        revision = environment["GITHUB_SHA"]
    return address.rstrip("/") if address else None, revision


def urls(address: str | None, revision: str) -> dict[str, str]:
    """``project.urls``; none without an address."""
    if address is None:
        return {}
    return {
        "Homepage": address,  # as pip show names it
        "Repository": address,
        "Documentation": f"{address}/blob/{revision}/docs/index.md",
        "Changelog": f"{address}/blob/{revision}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def for_an_index(markdown: str, address: str | None, revision: str) -> str:
    """The text with every relative link leading to the repository, or, without an address, as its text."""

    def written(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or _ABSOLUTE.match(target):
            return found[0]
        if address is None:
            return found["text"]
        kind = "raw" if found["image"] else "blob"
        path = f"README.md{target}" if target.startswith("#") else target.removeprefix("./")
        return f"{found['image']}[{found['text']}]({address}/{kind}/{revision}/{path})"

    return _CODE_OR_LINK.sub(written, markdown)
