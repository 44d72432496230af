"""Checkpoints at URLs: an object store that two ranks see, and a memory that one process sees."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from object_store import BUCKET, ObjectStore, object_store
from pool import WorkerPool
from safetensors.torch import save as safetensors_bytes
from small_models import Stack
from trained_parts import largest_difference, loader, make_trainer, together, weights

from lightning_pp.checkpoint.reading.open import read_alone
from lightning_pp.checkpoint.storage import remote_folder
from lightning_pp.checkpoint.storage.location import locate
from lightning_pp.cli.export import main as export
from lightning_pp.errors import CheckpointError

EXACT = 1e-12
Layout = tuple[int, int] | None


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def in_this_process(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)


def fit(
    url: str,
    layout: Layout,
    max_epochs: int,
    options: dict[str, Any],
    checkpoint: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    fail: bool = False,
) -> dict[str, Any]:
    """Trains with checkpoints at a URL, from where ``ckpt_path`` stands; four steps are an epoch."""
    if fail and os.environ["RANK"] == "1":
        os.environ.update(AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    callbacks = [ModelCheckpoint(**checkpoint)] if checkpoint else None
    arguments = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks), "max_epochs": max_epochs}
    trainer = make_trainer(layout, url, options, **arguments)  # type: ignore[arg-type]
    module = Stack().double()
    error = ""
    try:
        trainer.fit(module, loader(layout[1] if layout else 1), ckpt_path=ckpt_path)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    best = callbacks[0].best_model_path if callbacks else ""
    return {"weights": weights(module), "best": best, "error": error, "step": trainer.global_step}


def uninterrupted(folder: Path, max_epochs: int) -> dict[str, torch.Tensor]:
    trainer = make_trainer(None, folder, max_epochs=max_epochs)
    module = Stack().double()
    trainer.fit(module, loader())
    return weights(module)


EVERY_SECOND = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max"}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "async"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_two_ranks_train_and_resume(
    pool: WorkerPool, store: ObjectStore, tmp_path: Path, sharded: bool, in_background: bool
) -> None:
    """Saves each second step, keeps the best two and the last, and resumes from the last as if it had not stopped."""
    name = f"run_{sharded}_{in_background}"
    url = f"s3://{BUCKET}/{name}"
    options = {"save_distributed_checkpoint": sharded, "async_checkpoint": in_background}
    saved = {**EVERY_SECOND, "save_last": True}
    first = pool.run(fit, url, (2, 1), 1, options, saved, environ=store.environ)
    kept = f"{name}/checkpoints/"
    assert [result["error"] for result in first] == ["", ""]
    assert [result["best"] for result in first] == [f"{url}/checkpoints/step=4.ckpt"] * 2
    assert store.checkpoints(kept) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    if sharded:
        # of the two saves that went to the same name, the files of the last one
        files = store.names(f"{kept}last.ckpt/")
        assert ".metadata" in files and "meta.pt" in files and len(files) == 5, files
    second = pool.run(fit, url, (2, 1), 2, options, saved, "last", environ=store.environ)
    assert [(result["error"], result["step"]) for result in second] == [("", 8)] * 2
    assert largest_difference(together([result["weights"] for result in second]), uninterrupted(tmp_path, 2)) < EXACT
    assert store.checkpoints(kept) == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert not list(tmp_path.parent.glob("s3:*")) and not Path("s3:").exists()


@pytest.mark.nightly
@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_other_layouts_resume(pool: WorkerPool, store: ObjectStore, tmp_path: Path, sharded: bool) -> None:
    """Two replicas, two stages and one device go on from what two stages saved."""
    url = f"s3://{BUCKET}/layouts_{sharded}"
    options = {"save_distributed_checkpoint": sharded}
    saved = {**EVERY_SECOND, "dirpath": f"{url}/kept", "save_top_k": 1}
    (best, _) = pool.run(fit, url, (2, 1), 1, options, saved, environ=store.environ)
    assert best["best"] == f"{url}/kept/step=4.ckpt"
    expected = uninterrupted(tmp_path, 2)
    layouts: list[Layout] = [(1, 2), (1, 1)] if sharded else [(1, 2), (1, 1), None]
    for layout in layouts:
        world_size = 2 if layout == (1, 2) else 1
        results = pool.run(
            fit, str(tmp_path), layout, 2, {}, None, best["best"], world_size=world_size, environ=store.environ
        )
        assert [(result["error"], result["step"]) for result in results] == [("", 8)] * world_size
        for result in results:
            found = {name: value for name, value in result["weights"].items() if name in expected}
            assert largest_difference({**expected, **found}, expected) < EXACT
        assert largest_difference(together([result["weights"] for result in results]), expected) < EXACT


TRAINED = f"s3://{BUCKET}/trained"


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, store: ObjectStore) -> dict[str, torch.Tensor]:
    """The weights in the checkpoint ``model.ckpt`` at :data:`TRAINED`, of two stages."""
    results = pool.run(fit, TRAINED, (2, 1), 1, {}, {"dirpath": TRAINED, "filename": "model"}, environ=store.environ)
    return together([result["weights"] for result in results])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "async"])
def test_a_failure_of_one_rank_is_told_on_all(
    pool: WorkerPool, store: ObjectStore, in_this_process: None, trained: dict[str, torch.Tensor], in_background: bool
) -> None:
    """Rank 1 loses the store: the checkpoint that was to be replaced stays, and loads."""
    options = {"async_checkpoint": in_background}
    saved = {"dirpath": TRAINED, "filename": "model", "enable_version_counter": False, "every_n_train_steps": 4}
    before = store.names("trained/")
    results = pool.run(fit, TRAINED, (2, 1), 1, options, saved, None, True, environ=store.environ, timeout=120)
    for result in results:
        assert result["error"].startswith(f"CheckpointError: {TRAINED}/model.ckpt cannot be written"), result["error"]
        assert "127.0.0.1:9" in result["error"] and "on rank 1" in result["error"]
    assert store.names("trained/") == before
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert largest_difference(read_alone(f"{TRAINED}/model.ckpt")["state_dict"], trained) == 0


def die_before_the_table(url: str, saved: dict[str, Any]) -> None:
    remote_folder.commit = lambda *_: os._exit(1)
    fit(url, (2, 1), 2, {}, saved, f"{url}/model.ckpt")


@pytest.mark.nightly
def test_a_job_that_is_killed_leaves_the_checkpoint_before(pool: WorkerPool, store: ObjectStore) -> None:
    """The first rank dies when all shards of the next checkpoint of that name are there, and its table is not."""
    url = f"s3://{BUCKET}/killed"
    saved = {"dirpath": url, "filename": "model", "enable_version_counter": False}
    pool.run(fit, url, (2, 1), 1, {}, saved, environ=store.environ)
    before = set(store.names("killed/"))
    pool.run(die_before_the_table, url, saved, environ=store.environ, expect_failure=True)
    left = set(store.names("killed/")) - before
    assert before <= set(store.names("killed/")) and len(left) == 3, left
    results = pool.run(fit, url, (2, 1), 2, {}, saved, f"{url}/model.ckpt", environ=store.environ)
    assert [(result["error"], result["step"]) for result in results] == [("", 8)] * 2
    assert len(store.names("killed/")) == len(before) and not left & set(store.names("killed/"))


def fit_where_nothing_is_removed(url: str, options: dict[str, Any], saved: dict[str, Any]) -> str:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    filesystem = fsspec.get_filesystem_class("s3")
    originals = filesystem.rm, filesystem.rm_file
    filesystem.rm = filesystem.rm_file = refuse
    try:
        error: str = fit(url, (2, 1), 1, options, saved)["error"]
        return error
    finally:
        filesystem.rm, filesystem.rm_file = originals


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_background", [False, True], ids=["waiting", "async"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_a_removal_that_fails_is_told_on_all(
    pool: WorkerPool, store: ObjectStore, sharded: bool, in_background: bool
) -> None:
    url = f"s3://{BUCKET}/unremovable_{sharded}_{in_background}"
    options = {"async_checkpoint": in_background, "save_distributed_checkpoint": sharded}
    saved = {**EVERY_SECOND, "save_top_k": 1, "dirpath": url}
    for error in pool.run(fit_where_nothing_is_removed, url, options, saved, environ=store.environ):
        assert error.startswith(f"CheckpointError: {url}/step=2.ckpt"), error
        assert "cannot be removed (PermissionError: Access Denied) (on rank 0)" in error


@pytest.mark.nightly
def test_a_folder_without_its_table_is_no_checkpoint(pool: WorkerPool, store: ObjectStore) -> None:
    """As a job that was killed leaves it: not the last one, refused by name, and written over by the next save."""
    url = f"s3://{BUCKET}/partial"
    saved = {"dirpath": url, "filename": "first", "save_last": True, "save_top_k": 1}
    pool.run(fit, url, (2, 1), 1, {}, saved, environ=store.environ)
    store.delete("partial/last.ckpt/.metadata")
    results = pool.run(fit, url, (2, 1), 1, {}, None, f"{url}/last.ckpt", environ=store.environ)
    for result in results:
        assert f"{url}/last.ckpt is not a complete checkpoint" in result["error"]
    left = set(store.names("partial/last.ckpt/"))
    results = pool.run(fit, url, (2, 1), 1, {}, {**saved, "filename": "second"}, "last", environ=store.environ)
    assert [(result["error"], result["step"]) for result in results] == [("", 4)] * 2
    assert store.checkpoints("partial/") == ["first.ckpt", "last.ckpt", "second.ckpt"]
    assert not left & set(store.names("partial/last.ckpt/")) - {"meta.pt"}


@pytest.mark.nightly
def test_a_missing_shard_is_named(pool: WorkerPool, store: ObjectStore) -> None:
    url = f"s3://{BUCKET}/missing"
    pool.run(fit, url, (2, 1), 1, {}, {"dirpath": url, "filename": "model"}, environ=store.environ)
    shard = next(name for name in store.names("missing/model.ckpt/") if name.endswith("__1_0.distcp"))
    store.delete(f"missing/model.ckpt/{shard}")
    for result in pool.run(fit, url, (2, 1), 1, {}, None, f"{url}/model.ckpt", environ=store.environ):
        assert f"{url}/model.ckpt/{shard} is missing" in result["error"]


def test_a_folder_is_exported_by_one_process(
    store: ObjectStore,
    in_this_process: None,
    trained: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for target in (f"{TRAINED}/plain.ckpt", str(tmp_path / "missing.ckpt")):
        source = f"{TRAINED}/{'model' if target.startswith('s3') else 'missing'}.ckpt"
        with pytest.raises(SystemExit):
            export([source, target])
    told = capsys.readouterr().err
    assert "is a URL. Give a target on this machine" in told and f"{TRAINED}/missing.ckpt does not exist" in told
    export([f"{TRAINED}/model.ckpt", str(tmp_path / "plain.ckpt")])
    assert largest_difference(torch.load(tmp_path / "plain.ckpt")["state_dict"], trained) == 0
    # what is downloaded is a checkpoint as well
    (tmp_path / "model.ckpt").mkdir()
    for name in store.names("trained/model.ckpt/"):
        (tmp_path / "model.ckpt" / name).write_bytes(store.get(f"trained/model.ckpt/{name}"))
    assert largest_difference(read_alone(tmp_path / "model.ckpt")["state_dict"], trained) == 0


def test_a_file_of_a_web_server(tmp_path: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    torch.save({"state_dict": {"a": torch.ones(3)}}, tmp_path / "model.ckpt")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert torch.equal(read_alone(f"{url}/model.ckpt")["state_dict"]["a"], torch.ones(3))
        with pytest.raises(CheckpointError, match=f"{url}/other.ckpt does not exist"):
            read_alone(f"{url}/other.ckpt")
    finally:
        server.shutdown()
        server.server_close()


def start(url: str) -> dict[str, Any]:
    trainer = make_trainer((2, 1), Path("/unused"), {"initial_weights": url})
    module = Stack().double()
    trainer.validate(module, loader(), verbose=False)
    return weights(module)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["model.safetensors", "hub/"])
def test_initial_weights(pool: WorkerPool, store: ObjectStore, name: str) -> None:
    module = Stack().double()
    expected = {name: torch.full_like(value, 0.25) for name, value in weights(module).items()}
    store.put("start/model.safetensors", safetensors_bytes(expected))
    store.put("start/hub/model.safetensors", safetensors_bytes(expected))
    found = together(pool.run(start, f"s3://{BUCKET}/start/{name}", environ=store.environ))
    assert largest_difference(found, expected) == 0


def fit_twice(url: str, options: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    assert fit(url, (1, 1), 1, options, saved)["error"] == ""
    return fit(url, (1, 1), 2, options, saved, "last")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_background", [True, False], ids=["engine", "plain"])
def test_memory_of_one_process(pool: WorkerPool, tmp_path: Path, in_background: bool) -> None:
    """One device: Lightning's own file, and with ``async_checkpoint`` the engine's folder."""
    url = f"memory://one_process_{in_background}"
    options = {"async_checkpoint": in_background}
    saved = {**EVERY_SECOND, "dirpath": url, "save_last": True}
    (result,) = pool.run(fit_twice, url, options, saved, world_size=1)
    assert (result["error"], result["step"]) == ("", 8)
    assert largest_difference(result["weights"], uninterrupted(tmp_path, 2)) < EXACT


def test_memory_of_one_process_is_not_enough_for_two(pool: WorkerPool) -> None:
    results = pool.run(fit, "memory://two", (2, 1), 1, {}, {"dirpath": "memory://two", "filename": "model"})
    for result in results:
        assert "each process has a memory:// of its own" in result["error"], result["error"]


def test_what_cannot_be_a_location(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needs a package that is not installed here\. .*gcsfs"):
        locate("gs://bucket/model.ckpt")
    with pytest.raises(CheckpointError, match="unheard://bucket cannot be opened .*Protocol not known"):
        locate("unheard://bucket")
    with pytest.raises(CheckpointError, match=r"Give the URL as a string, s3://"):
        locate(Path("s3://bucket/model.ckpt"))
    assert locate(f"file://{tmp_path}/model.ckpt") == tmp_path / "model.ckpt"
    assert locate("model.ckpt") == Path("model.ckpt")
