"""What the logger of W&B makes of checkpoints, and what it asks wandb for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import wandb
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import WorkerPool
from wandb_runs import of_type, records

from lightning_pp import PipelineWandbLogger
from lightning_pp.callbacks._lightning_private import init_arguments
from lightning_pp.conf.schema import WandbConf
from lightning_pp.errors import ConfigurationError


def write_checkpoint(path: Path, *, is_folder: bool) -> str:
    if is_folder:
        path.mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            (path / name).write_text(name)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
    return str(path)


def callback_with(best: str, last: str, *others: str) -> ModelCheckpoint:
    callback = ModelCheckpoint(monitor="val_loss")
    callback.best_model_path, callback.last_model_path = best, last
    callback.best_k_models = dict.fromkeys((best, *others))  # type: ignore[misc]
    return callback


KINDS: dict[str, dict[str, Any]] = {
    "at_the_end": {"log_model": True},
    "each": {"log_model": "all"},
    "references": {"log_model": True, "log_model_as": "reference"},
}


def log_checkpoints(folder: str) -> None:
    """In a process of its own, by loggers of all kinds: two checkpoints, and then one at a URL."""
    for kind, options in KINDS.items():
        home = Path(folder, kind)
        logger = PipelineWandbLogger(save_dir=home, project="artifacts", id=kind, offline=True, **options)
        logger.log_metrics({"x": 1.0})
        best = write_checkpoint(home / "best.ckpt", is_folder=True)
        last = write_checkpoint(home / "last.ckpt", is_folder=False)
        logger.after_save_checkpoint(callback_with(best, last))
        logger.finalize("success")
        logger.after_save_checkpoint(callback_with(best, "s3://bucket/far.ckpt"))
        logger.finalize("success")
        wandb.finish()


@pytest.fixture(scope="module")
def logged(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    variables = {f"WANDB_{kind}_DIR": str(folder / "home") for kind in ("DATA", "CACHE", "CONFIG")}
    pool.run(log_checkpoints, str(folder), world_size=1, timeout=90, environ={**variables, "WANDB_SILENT": "true"})
    return folder


def artifacts(folder: Path) -> list[dict[str, Any]]:
    return [record for record in of_type(records(folder), "artifact") if record["type"] == "model"]


@pytest.mark.parametrize("kind", ["at_the_end", "each"])
def test_checkpoints_are_artifacts_once(kind: str, logged: Path) -> None:
    best, last, far = artifacts(logged / kind)
    contents = {entry["path"]: entry for entry in best["manifest"]["contents"]}
    assert set(contents) == {f"model.ckpt/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")}
    assert Path(contents["model.ckpt/__1_0.distcp"]["local_path"]).read_text() == "__1_0.distcp"
    assert set(best["aliases"]) == {"best", "latest"}  # wandb moves "latest" to whatever comes next
    assert last["aliases"] == far["aliases"] == ["latest"]
    assert [entry["path"] for entry in last["manifest"]["contents"]] == ["model.ckpt"]
    (reference,) = far["manifest"]["contents"]
    assert reference["ref"] == "s3://bucket/far.ckpt" and "local_path" not in reference
    assert {artifact["name"] for artifact in (best, last, far)} == {f"model-{kind}"}


def test_references_copy_nothing(logged: Path) -> None:
    best, last, far = artifacts(logged / "references")
    where = (logged / "references").as_uri()
    assert all("local_path" not in entry for a in (best, last, far) for entry in a["manifest"]["contents"])
    assert {entry["ref"].rpartition("/")[0] for entry in best["manifest"]["contents"]} == {f"{where}/best.ckpt"}
    assert [entry["ref"] for entry in last["manifest"]["contents"]] == [f"{where}/last.ckpt"]


def test_what_becomes_of_a_run_that_is_there_is_asked_of_wandb(tmp_path: Path) -> None:
    logger = instantiate(WandbConf(save_dir=str(tmp_path), id="run7", resume="must"))
    assert isinstance(logger, PipelineWandbLogger)
    asked = init_arguments(logger)
    assert (asked["id"], asked["resume"], asked["mode"]) == ("run7", "must", "offline")


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ConfigurationError, match="log_model='last' must be True, False or 'all'"):
        PipelineWandbLogger(log_model="last")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="log_model_as='link' must be 'files' or 'reference'"):
        PipelineWandbLogger(log_model_as="link")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="every_node=True needs offline=False"):
        PipelineWandbLogger(offline=True, every_node=True)


def test_processes_of_all_nodes_join_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: asked.append(arguments))
    logger = PipelineWandbLogger(every_node=True, project="nodes", settings={"x_stats_sampling_interval": 5.0})
    settings = logger.settings_of_node(0)
    assert settings.mode == "shared" and settings.x_primary and settings.x_label == "node_0"
    assert settings.x_stats_sampling_interval == 5.0

    class OtherNode:
        """A trainer's first process on the third of four nodes, where rank 0 has told of its run."""

        num_nodes, node_rank, local_rank, is_global_zero = 4, 2, 0, False
        strategy = L.strategies.SingleDeviceStrategy()

    monkeypatch.setattr(OtherNode.strategy, "broadcast", lambda told: ("abc", "nodes", None))
    logger.watch_this_node(OtherNode())  # type: ignore[arg-type]
    (arguments,) = asked
    joined = arguments.pop("settings")
    assert {name: arguments[name] for name in ("id", "project", "entity")} == {
        "id": "abc",
        "project": "nodes",
        "entity": None,
    }
    assert joined.mode == "shared" and not joined.x_primary and joined.x_label == "node_2"
    assert not joined.x_update_finish_state  # the run is over when rank 0 says so
