"""Commands of benchmarks, as the documentation and the scripts tell them: the script is there, and takes its options.

Each script is run until it has read its command line. What it does after that is held to the package by mypy.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pool import fork_context

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("benchmarks/**/*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), *SCRIPTS]
Command = tuple[str, tuple[str, ...]]


def commands(page: Path) -> set[Command]:
    """Scripts with their arguments, without the brackets and dots that say what may be left out."""
    lines = re.findall(r"(?:python|torchrun --nproc-per-node 2) (benchmarks/\S+?\.py)([^`#\n]*)", page.read_text())
    return {(script, tuple(shlex.split(re.sub(r"[][]|\.\.\.", "", rest)))) for script, rest in lines}


def read_command_lines(given: list[Command], answer: Connection) -> None:
    """Runs each script until it has read its command line; sends what went wrong."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parse_args(self, *args, **kwargs)
        raise EOFError

    argparse.ArgumentParser.parse_args = parse_and_end  # type: ignore[method-assign]
    found = []
    for script, arguments in given:
        sys.argv, path = [script, *arguments], list(sys.path)
        sys.path.insert(0, str((ROOT / script).parent))
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
            found.append(f"{shlex.join(sys.argv)} reads no command line")
        except EOFError:
            pass
        except BaseException:
            found.append(f"{shlex.join(sys.argv)}\n{traceback.format_exc()}")
        sys.path[:] = path
    answer.send(found)


def test_scripts_take_the_commands_that_are_documented() -> None:
    found = set().union(*map(commands, PAGES))
    assert len(found) > 70
    assert [script for script, _ in found if not (ROOT / script).is_file()] == []
    have_options = {script for script, _ in found if "ArgumentParser" in (ROOT / script).read_text()}
    assert [(script, arguments) for script, arguments in found if arguments and script not in have_options] == []

    context = fork_context()
    connection, child = context.Pipe()
    given = sorted(command for command in found if command[0] in have_options)
    process = context.Process(target=read_command_lines, args=(given, child))
    process.start()
    failures: list[str] = connection.recv()
    process.join(30)
    assert not failures, "\n".join(failures)
