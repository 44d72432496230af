"""Makes a pip.conf of ``pip config list``, and prints the local places in it: docker/pip_settings.py PIP_CONF."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path


def settings(listed: str) -> dict[str, str]:
    """Values by option, of whichever file or variable; later ones replace earlier ones, as in pip."""
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.removeprefix(":env:").rpartition(".")[2]] = ast.literal_eval(value)
    return found


def places(options: dict[str, str]) -> list[str]:
    """Files and folders that are there, those within another left out; of an index the folder that it links into."""
    named = {Path(path) for value in options.values() for path in re.findall(r"(?<!\S)(/\S+)", value)}
    named |= {Path(path).parent for value in options.values() for path in re.findall(r"file://(/\S+)", value)}
    there = sorted(path for path in named if path.exists())
    return [str(path) for path in there if not any(other in path.parents for other in there)]


if __name__ == "__main__":
    options = settings(sys.stdin.read())
    lines = [f"{name} = {' '.join(value.split())}" for name, value in options.items()]
    Path(sys.argv[1]).write_text("\n".join(["[global]", *lines, ""]))
    sys.stdout.write("".join(f"{place}\n" for place in places(options)))
