"""The Python blocks of pages that are no guides run, one after the other, with the names that a page takes for granted.

Those of guides are run as scripts (``test_code_blocks.py``), those of models of today in ``test_models_of_today.py``;
``split_graphs`` and ``streamed.py`` where what they do is tested (``tests/parity/steps/batches/test_graph_batches.py``,
``tests/recipes/test_streams.py``). README's is in ``test_readme.py``.
"""

from __future__ import annotations

import gc
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from command import run_command
from lightning.pytorch.utilities import grad_norm
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Descends, Losses
from test_code_blocks import DOCS, PAGES, blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.callbacks import PredictionWriter
from lightning_pp.schedule import Schedule, StageCosts, build_schedule

#: Pages with Python blocks, and the processes that they are run in; 0: run by other tests, or below by itself.
PROCESSES = {
    **dict.fromkeys(("README", "tutorial", "migrating", "batches", "data", "recipes"), 0),
    **dict.fromkeys(("precision_and_memory", "schedules", "sharding", "lightning", "clusters", "tensor_parallel"), 1),
    **dict.fromkeys(("metrics", "models"), 2),
}
FEATURES, ROWS = 4, 16


class Module(Descends):
    """Four layers; stops after some steps, since no page says when."""

    def __init__(self, num_steps: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)])
        self.num_steps = num_steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        predicted: Tensor = self.layers(batch[0])
        return predicted

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.global_step >= self.num_steps

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(20 * ROWS, FEATURES)), batch_size=ROWS)

    predict_dataloader = train_dataloader


class Data(L.LightningDataModule):
    train_dataloader = Module.train_dataloader
    predict_dataloader = Module.train_dataloader


def run_blocks(page: Path, folder: Path) -> dict[str, Any]:
    """Runs the blocks of a page in ``folder``; returns the names that they leave."""
    os.chdir(folder)
    module = sys.modules["page"] = ModuleType("page")  # what a strategy replaces for a fit it looks for in modules
    names = vars(module)
    names |= {
        "L": L,
        "Path": Path,
        "torch": torch,
        "grad_norm": grad_norm,
        "PipelineParallelStrategy": PipelineParallelStrategy,
        "module": Module(),
        "datamodule": Data(),
        "strategy": PipelineParallelStrategy(num_microbatches=4),
        "costs": StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0, gather=0.1, reduce=0.1),
    }
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    return names


def run_page(page: Path, folder: Path, looked_at: str) -> Any:
    """In a worker: runs the blocks, and returns what ``check_<looked_at>`` says of them."""
    before, modules = os.getcwd(), set(sys.modules)
    try:
        return globals()[f"look_at_{looked_at}"](run_blocks(page, folder))
    finally:
        os.chdir(before)
        for name in set(sys.modules) - modules:
            if name.startswith(("pytorch_lightning", "page")):
                del sys.modules[name]


def look_at_metrics(names: dict[str, Any]) -> dict[str, Any]:
    """Trains once more, with the profiler of the page and its hook."""

    class WithNorms(Module):
        on_before_optimizer_step = names["on_before_optimizer_step"]

    run = names["trainer"]
    run.fit(WithNorms(), Data())
    return {
        "steps": names["module"].trainer.global_step,
        "report": names["monitor"].report is not None,
        "norm": float(run.callback_metrics["grad_2.0_norm_total"]),
    }


def look_at_models(names: dict[str, Any]) -> list[float]:
    """Trains the page's mixture of experts with its strategy, on a text that repeats itself."""
    found = Losses()
    run = trainer(2, names["strategy"], callbacks=[found])
    torch.manual_seed(0)
    run.fit(names["MixtureOfExperts"](), DataLoader(torch.arange(9).repeat(20 * ROWS, 1), batch_size=ROWS))
    return found.losses


def look_at_lightning(names: dict[str, Any]) -> bool:
    import pytorch_lightning

    return pytorch_lightning.Trainer is L.Trainer


def test_every_page_with_python_is_run() -> None:
    assert set(PROCESSES) == {page.stem for page in PAGES if blocks(page, "python")}


def test_metrics_and_timelines(pool: WorkerPool, tmp_path: Path) -> None:
    first, last = pool.run(run_page, DOCS / "training" / "metrics.md", tmp_path, "metrics", world_size=2, timeout=120)
    assert first["steps"] == last["steps"] == 16 and (first["report"], last["report"]) == (True, False)
    assert first["norm"] == last["norm"] > 0
    assert "<html" in (tmp_path / "step.html").read_text() and "traceEvents" in (tmp_path / "step.json").read_text()
    assert list(tmp_path.rglob("*.pt.trace.json*")), "no trace of the profiler"


def test_the_other_lightning_package(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(run_page, DOCS / "start" / "lightning.md", tmp_path, "lightning", world_size=1) == [True]


def test_a_mixture_of_experts(pool: WorkerPool, tmp_path: Path) -> None:
    first, last = pool.run(run_page, DOCS / "start" / "models.md", tmp_path, "models", world_size=2, timeout=120)
    assert first == last and first[-1] < first[0] / 4


class Collections(L.Callback):
    """Notes at each batch whether Python collects by itself, and how often all was collected by then."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.found.append((gc.isenabled(), gc.get_stats()[2]["collections"]))


def look_at_clusters(names: dict[str, Any]) -> tuple[list[tuple[bool, int]], bool]:
    noted = Collections()
    trainer(1, "auto", callbacks=[names["SteadyCollection"](every=5), noted]).fit(Module(), Data())
    return noted.found, gc.isenabled()


def test_garbage_is_collected_after_certain_batches(pool: WorkerPool, tmp_path: Path) -> None:
    ((found, is_on_afterwards),) = pool.run(
        run_page, DOCS / "running" / "clusters.md", tmp_path, "clusters", world_size=1
    )
    assert [is_on for is_on, _ in found] == [False] * 16 and is_on_afterwards
    numbers = [number for _, number in found]
    assert [after - before for before, after in pairwise(numbers)] == [0, 0, 0, 0, 1] * 3


@pytest.mark.parametrize("page", ["precision_and_memory", "tensor_parallel"])
def test_strategies_that_are_shown_can_be_made(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(DOCS / "training" / f"{page}.md", tmp_path)


def test_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_schedule("1f1b", num_ranks=2, num_microbatches=4).to_csv("mine.csv")
    names = run_blocks(DOCS / "inside" / "schedules.md", tmp_path)
    written = Schedule.from_csv(tmp_path / "zb_v.csv")
    assert written.simulate(names["costs"]).makespan == pytest.approx(names["simulation"].makespan)
    program = run_blocks(DOCS / "training" / "sharding.md", tmp_path)["program"]
    assert "0UNSHARD" in program.csv_text() and "0RESHARD" in program.csv_text()


def test_predictions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainer(1, "auto", callbacks=[PredictionWriter("outputs/.../predictions")], limit_predict_batches=2)
    run.predict(Module(), Data(), return_predictions=False)
    capsys.readouterr()
    exec(blocks(DOCS / "training" / "data.md", "python")[1], {})
    printed = capsys.readouterr().out
    assert printed.count("tensor(") == 2 and str(list(range(ROWS))) in printed, printed


def test_the_application_of_the_recipes_page(tmp_path: Path) -> None:
    (application,) = blocks(DOCS / "training" / "recipes.md", "python")
    (tmp_path / "train.py").write_text(
        application.replace("...", "print(config.strategy.schedule, list(config.callbacks))")
    )
    (tmp_path / "conf").mkdir()
    (config,) = [block for block in blocks(DOCS / "training" / "recipes.md", "yaml") if "defaults" in block]
    (tmp_path / "conf" / "config.yaml").write_text(config)
    finished = run_command(["+schedule=v_half"], tmp_path, module="train")
    assert (finished.code, finished.output) == (0, "v_half ['pipeline_monitor']\n")
