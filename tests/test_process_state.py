"""What importing the package, making a strategy and a Trainer, and set-up leave as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "process_state_script.py"
# what Lightning sets for any strategy whose processes it starts
OF_LIGHTNING = {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"}


def states(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What a script of its own noted of its process on the first rank, by when."""
    left_out = OF_LIGHTNING | {"GLOO_SOCKET_IFNAME", "PL_GLOBAL_SEED"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}


@pytest.mark.nightly
def test_nothing_is_changed_before_the_first_batch(tmp_path: Path) -> None:
    noted = states(tmp_path)
    assert sorted(noted) == ["0_before", "1_imported", "2_strategy", "3_trainer", "4_set_up"]
    before = noted["0_before"]
    for when, found in sorted(noted.items()):
        new_loggers = found["loggers"].keys() - before["loggers"].keys()
        assert {name.partition(".")[0] for name in new_loggers} <= {
            "lightning_pp",
            "torch",
            "upath",
            "c10d-NullHandler-dcp_logger",
        }
        found["loggers"] = {name: state for name, state in found["loggers"].items() if name in before["loggers"]}
        if when == "4_set_up":
            added = {name: value for name, value in found["environment"].items() if name not in before["environment"]}
            assert added.keys() == OF_LIGHTNING
            found["environment"] = {name: value for name, value in found["environment"].items() if name not in added}
        assert found == before, when
