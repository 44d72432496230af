"""A diagnosis in every kind of logger."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from pool import WorkerPool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_runs import records, summary_of
from wandb_runs import table as table_of

from lightning_pp.callbacks.monitor.logger_outputs import LoggerOutputs
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.finding import Finding

FINDING = Finding("data", "Rank 0 waits.", "4 workers", 12.0, 0.2, "data.num_workers=4", "num_workers=4")


EARLY, LATE = Diagnosis([FINDING], 8, 60.0, 59.0), Diagnosis([], 8, 50.0, 49.0)


def log_both(folder: str) -> None:
    """In a process of its own, since W&B leaves variables behind."""
    loggers = [
        WandbLogger(project="diagnosed", save_dir=folder, offline=True),
        TensorBoardLogger(folder, name="board", version="run"),
        CSVLogger(folder, name="csv", version="run"),
    ]
    outputs = LoggerOutputs(loggers)
    outputs.log_diagnosis(EARLY, 7)
    outputs.log_diagnosis(LATE, 20)
    for logger in loggers:
        logger.save()
        logger.finalize("success")
    wandb.finish()


@pytest.mark.nightly
def test_each_logger_has_the_latest_diagnosis_in_its_own_way(pool: WorkerPool, tmp_path: Path) -> None:
    homes = {f"WANDB_{kind}_DIR": str(tmp_path / "home") for kind in ("DATA", "CACHE", "CONFIG")}
    pool.run(log_both, str(tmp_path), world_size=1, environ={**homes, "WANDB_SILENT": "true"})
    assert summary_of(tmp_path)["pp/diagnosis"] == LATE.text
    (row,) = table_of(tmp_path, "pp/findings")
    assert row == vars(FINDING)
    assert any("pp/findings" in str(record) for record in records(tmp_path))
    board = EventAccumulator(str(tmp_path / "board" / "run"), size_guidance={"tensors": 0}).Reload()
    texts = {
        event.step: event.tensor_proto.string_val[0].decode() for event in board.Tensors("pp/diagnosis/text_summary")
    }
    assert {step: text.split() for step, text in texts.items()} == {7: EARLY.text.split(), 20: LATE.text.split()}
    hyperparameters = yaml.safe_load((tmp_path / "csv" / "run" / "hparams.yaml").read_text())
    assert hyperparameters["pp/diagnosis"] == LATE.text
