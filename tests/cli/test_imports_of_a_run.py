"""What a run imports: nothing of a logger that it does not have; and a run that is refused, nothing slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import TINY_RUN

SCRIPT = """
import sys
from lightning_pp.cli import main

main()
print("imported:", "wandb" in sys.modules)
"""


@pytest.mark.nightly
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


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("module", "override", "told"),
    [
        ("lightning_pp", "recipe=gpt3", "recipe is one of byte_gpt, "),
        ("lightning_pp", "trainer.max_stepz=3", "trainer has no max_stepz. Closest names: trainer.max_steps, "),
        ("lightning_pp", "strategy.schedul=zb_v", "strategy has no schedul. Closest names: strategy.schedule\n"),
        ("lightning_pp", "model.dimm=8", "model has no dimm. Closest names: model.dim\n"),
        ("lightning_pp.cli.plan.command", "data.seq_length=8", "data has no seq_length. Closest names: data.seq_len"),
        ("lightning_pp.cli.verify", "schedule=zb_9", "schedule is one of "),
    ],
)
def test_a_typo_is_told_before_torch_is_imported(module: str, override: str, told: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, override],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 1
    assert f": {override}: {told}" in finished.stderr
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines() if "import time:" in line}
    assert "hydra" in imported  # the table is there
    assert not imported & {"torch", "lightning", "lightning.pytorch", "transformers", "wandb"}
