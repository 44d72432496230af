"""What a run imports: nothing of a logger that it does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from command import TINY_RUN

SCRIPT = """
import sys
from lightning_pp.cli import main

main()
print("imported:", "wandb" in sys.modules)
"""


def test_a_training_that_logs_to_csv_does_not_import_wandb(tmp_path: Path) -> None:
    overrides = [option for option in TINY_RUN if "logger" not in option and "devices" not in option]
    overrides = [option for option in overrides if not option.startswith(("strategy", "trainer.max_steps"))]
    options = ["logger=csv", "trainer.devices=1", "trainer.max_steps=2"]
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, *overrides, *options],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "imported: False"
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "loss" in metrics.read_text()
