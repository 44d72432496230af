"""The line that every command prints for ``--version``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from lightning_pp import __version__


def version_line(command: str) -> str:
    """The version of this package, and of those on which a run depends most.

    Args:
        command: Whose name the line begins with.
    """
    others = {"torch": "torch", "lightning": "lightning", "hydra-core": "Hydra"}
    version_list = ", ".join(f"{name} {version(package)}" for package, name in others.items())
    return f"{command} {__version__} ({version_list})"


def parser_of(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser of the arguments of ``command`` that knows ``--version`` and keeps the lines of its texts."""
    parser = argparse.ArgumentParser(
        command, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=version_line(command))
    return parser


def answer_version(arguments: Sequence[str], command: str) -> None:
    """Prints the versions and ends the process, if ``arguments`` have ``--version``. For commands that Hydra parses."""
    if "--version" in arguments:
        sys.stdout.write(f"{version_line(command)}\n")
        sys.exit(0)
