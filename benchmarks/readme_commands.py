"""README's two commands as they stand there, in a fresh environment, with the seconds of each part.

    python benchmarks/readme_commands.py                     # the first: install, and train the default recipe
    python benchmarks/readme_commands.py --commands 2        # the second too: install the test extra, and run the tests
    python benchmarks/readme_commands.py --wheel FILE.whl    # the first, from a folder with nothing but constraints.txt

They run in a copy of this source tree, which is removed at the end, as is the environment that they make. pip takes
what its configuration says: ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` for the smaller torch,
``PIP_NO_CACHE_DIR=1`` to count downloads.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCES = (".git", ".venv", "venv", "__pycache__", ".*_cache", "outputs", "multirun", "build", "dist")
OF_AN_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def commands(readme: str) -> list[list[str]]:
    """The first two shell blocks of README, each as the commands that ``&&`` joins."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[:2]
    return [block.strip().split(" && ") for block in blocks]


def main() -> None:
    """Runs the commands; the exit code is that of the first part that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, choices=(1, 2), default=1)
    parser.add_argument("--wheel", type=Path)
    arguments = parser.parse_args()
    if arguments.wheel is not None and arguments.commands == 2:
        parser.error("a wheel has no tests: leave out --wheel or --commands 2")
    parts = [part for each in commands((ROOT / "README.md").read_text())[: arguments.commands] for part in each]
    environment = {name: value for name, value in os.environ.items() if name not in OF_AN_ENVIRONMENT}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fresh"
        if arguments.wheel is None:
            shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_SOURCES))
        else:
            folder.mkdir()
            shutil.copy(ROOT / "constraints.txt", folder)
            parts = [re.sub(r" \.$", f" {arguments.wheel.resolve()}", part) for part in parts]
        began = time.perf_counter()
        for part in parts:
            start = time.perf_counter()
            code = subprocess.run(["bash", "-c", part], cwd=folder, env=environment, check=False).returncode
            print(f"{time.perf_counter() - start:8.1f} s  {part}", flush=True)
            if code:
                sys.exit(code)
        print(f"{time.perf_counter() - began:8.1f} s  in all")


if __name__ == "__main__":
    main()
