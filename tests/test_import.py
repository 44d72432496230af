"""What importing the package does and does not do."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run_forked

import lightning_pp


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("missing", ["torch", "lightning"])
def test_schedules_need_no_torch(missing: str) -> None:
    code = f"""import sys
sys.modules[{missing!r}] = None  # importing it raises ModuleNotFoundError from here on
from lightning_pp.schedule import StageCosts, build_schedule
schedule = build_schedule("zb_h1", num_ranks=2, num_microbatches=4)
print(schedule.simulate(StageCosts(1.0, 1.0, 1.0)).makespan)
try:
    from lightning_pp import PipelineParallelStrategy
except ModuleNotFoundError as error:
    print(error.name.partition(".")[0])"""
    assert run(code).split() == ["13.0", missing]


def test_the_package_imports_neither_torch_nor_lightning() -> None:
    code = """import sys
import lightning_pp
print("torch" in sys.modules, "lightning" in sys.modules)
print(set(lightning_pp.__all__) <= set(dir(lightning_pp)), hasattr(lightning_pp, "Pipeline"))"""
    assert run(code).splitlines() == ["False False", "True False"]


def test_all_public_names_are_imported_with_a_star() -> None:
    names: dict[str, Any] = {}
    exec("from lightning_pp import *", names)
    assert "BatchPart" in lightning_pp.__all__
    assert all(names[name] is getattr(lightning_pp, name) for name in lightning_pp.__all__)
    strategy = names["PipelineParallelStrategy"]
    assert pickle.loads(pickle.dumps(strategy)) is strategy


LATE = """import sys
from lightning_pp import PipelineParallelStrategy
strategy = PipelineParallelStrategy(num_microbatches=4)
late = ("torch.distributed.checkpoint", "lightning_pp.strategy.engine", "lightning_pp.strategy.setup")
print([name for name in late if name in sys.modules])
import lightning_pp.checkpoint
print(late[0] in sys.modules, lightning_pp.checkpoint.newest_good.__name__, late[0] in sys.modules)
print(hasattr(lightning_pp.checkpoint, "Checkpoint"))
"""
# by day in a process that has imported them, and forgets them
FORGETS = """import sys
for name in [*sys.modules]:
    if name.partition(".")[0] == "lightning_pp" or name.startswith("torch.distributed.checkpoint"):
        del sys.modules[name]
"""


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_what_a_run_may_not_need_is_imported_when_it_is_used(tmp_path: Path, is_forked: bool) -> None:
    (tmp_path / "late.py").write_text(FORGETS + LATE)
    told = run_forked([], tmp_path, module="late").output if is_forked else run(LATE)
    assert told.splitlines() == ["[]", "False newest_good True", "False"]


@pytest.mark.nightly
def test_type_checkers_see_every_public_name_and_no_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import lightning_pp\n"
        + "".join(f"reveal_type(lightning_pp.{name})\n" for name in lightning_pp.__all__)
        + "lightning_pp.Pipeline\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(script)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=Path(lightning_pp.__file__).parents[1])
    revealed = [line for line in finished.stdout.splitlines() if "Revealed type" in line]
    assert len(revealed) == len(lightning_pp.__all__) and not [line for line in revealed if '"Any"' in line]
    assert 'Module has no attribute "Pipeline"' in finished.stdout


@pytest.mark.nightly
def test_the_documented_alias_makes_pytorch_lightning_the_same_package() -> None:
    page = (Path(__file__).parents[1] / "docs" / "start" / "lightning.md").read_text()
    snippet = page.partition("```python\n")[2].partition("```")[0]
    code = f"""{snippet}
import pytorch_lightning as pl
from pytorch_lightning.callbacks.model_checkpoint import ModelCheckpoint
from pytorch_lightning.utilities.types import STEP_OUTPUT
import torch
from lightning_pp import PipelineParallelStrategy
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
trainer = lightning.pytorch.Trainer(
    accelerator="cpu", strategy=PipelineParallelStrategy(1), devices=1, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(2, 2)))
print(trainer.global_step, ModelCheckpoint is lightning.pytorch.callbacks.ModelCheckpoint)
by_name = pl.Trainer(accelerator="cpu", devices=1, strategy="pipeline_parallel", logger=False).strategy
print(type(by_name) is PipelineParallelStrategy)"""
    assert run(code).splitlines()[-2:] == ["1 True", "True"]
