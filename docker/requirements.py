"""Prints what the package and some of its extras need, from pyproject.toml: docker/requirements.py EXTRA,EXTRA..."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """In their order; an extra that names others of the same package stands for what they need."""
    found = list(project["dependencies"])
    for extra in filter(None, extras):
        for requirement in project["optional-dependencies"][extra]:
            others = re.fullmatch(rf"{re.escape(project['name'])}\[(?P<extras>[\w,-]+)\]", requirement)
            found += requirements(project, others["extras"].split(",")) if others else [requirement]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    sys.stdout.write("\n".join(requirements(pyproject["project"], sys.argv[1].split(","))) + "\n")
