"""What importing the package does and does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_schedules_need_no_torch() -> None:
    code = "import sys, lightning_pp.schedule; print('torch' in sys.modules, 'lightning' in sys.modules)"
    assert run(code) == "False False"


@pytest.mark.parametrize(
    "imports",
    ["import lightning_pp; import lightning.pytorch as pl", "import lightning.pytorch as pl; import lightning_pp"],
)
def test_importing_registers_the_strategy(imports: str) -> None:
    code = f"""{imports}
from lightning.pytorch.strategies import StrategyRegistry
strategy = StrategyRegistry.get("pipeline_parallel")
trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="pipeline_parallel", logger=False)
print(type(strategy).__name__, type(trainer.strategy).__name__)"""
    assert run(code).splitlines()[-1] == "PipelineParallelStrategy PipelineParallelStrategy"
