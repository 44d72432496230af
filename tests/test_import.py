"""What importing the package does and does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("missing", ["torch", "lightning"])
def test_schedules_need_no_torch(missing: str) -> None:
    code = f"""import sys
sys.modules[{missing!r}] = None  # importing it raises ModuleNotFoundError from here on
from lightning_pp.schedule import StageCosts, build_schedule
schedule = build_schedule("zb_h1", num_ranks=2, num_microbatches=4)
print(schedule.simulate(StageCosts(1.0, 1.0, 1.0)).makespan, hasattr(sys.modules["lightning_pp"], "BatchPart"))"""
    assert run(code) == "13.0 False"


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
