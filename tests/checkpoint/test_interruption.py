"""A save that fails or dies leaves the checkpoint that was there before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pipeline_parts import differences, load_checkpoint, make_part, one_device, save_sharded
from pool import WorkerPool

from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage import torch_storage as storage
from lightning_pp.checkpoint.storage.torch_storage import TyingWriter


def save(path: Path, steps: list[int], fail_in: str = "", trainer_state: Any = None) -> None:
    part = make_part((2, 1))
    part.train(steps)
    write_data, commit = TyingWriter.write_data, folder.commit

    def failing_write(self: TyingWriter, *arguments: Any) -> Any:
        result = write_data(self, *arguments)
        if fail_in == "write" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return result

    def dying_commit(path: Path) -> None:
        path.rename(folder._previous_path(path))
        os._exit(9)

    try:
        if fail_in == "write":
            storage.TyingWriter.write_data = failing_write  # type: ignore[method-assign]
        if fail_in == "rename":
            folder.commit = dying_commit
        save_sharded(path, part.held, {"steps": steps} if trainer_state is None else trainer_state)
    finally:
        storage.TyingWriter.write_data = write_data  # type: ignore[method-assign]
        folder.commit = commit


def load(path: Path) -> tuple[Any, dict[str, Any]]:
    part = make_part((2, 1))
    trainer_state = load_checkpoint(path, part.held)
    return trainer_state, part.whole()


def check_loads(pool: WorkerPool, path: Path, steps: list[int]) -> None:
    (state, whole), (other_state, _) = pool.run(load, path, process_group=True)
    assert state == other_state == {"steps": steps}
    assert not differences(whole, one_device(steps))


def test_a_save_replaces_the_last_one(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.ckpt"
    for steps in ([0], [0, 1]):
        pool.run(save, path, steps, process_group=True)
        check_loads(pool, path, steps)
        assert [entry.name for entry in path.parent.iterdir()] == ["model.ckpt"]
    # a single file makes room for a folder
    path = tmp_path / "file.ckpt"
    path.write_text("a single-file checkpoint")
    pool.run(save, path, [0], process_group=True)
    check_loads(pool, path, [0])


def test_failed_write(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    pool.run(save, path, [0], process_group=True)
    for message in pool.refusals("CheckpointError", save, path, [0, 1], fail_in="write", process_group=True):
        assert "No space left on device (on rank 1)" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.ckpt"]
    check_loads(pool, path, [0])


def test_a_trainer_state_that_cannot_be_pickled(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    for message in pool.refusals("CheckpointError", save_unpicklable, path, process_group=True):
        assert "(on rank 0)" in message
    assert list(tmp_path.iterdir()) == []


def save_unpicklable(path: Path) -> None:
    save(path, [0], trainer_state={"hook": lambda: None})


def test_death_between_two_renames(pool: WorkerPool, tmp_path: Path) -> None:
    """The checkpoint before has no longer its name; test_killed_saves.py kills ranks while they write."""
    path = tmp_path / "model.ckpt"
    pool.run(save, path, [0], process_group=True)
    arguments: dict[str, Any] = {"process_group": True, "expect_failure": True, "grace": 3}
    report = pool.run(save, path, [0, 1], fail_in="rename", **arguments)
    assert any(failure is not None and failure.message == "exit code 9" for failure in report.failures)
    assert (tmp_path / ".model.ckpt.incomplete").is_dir()
    check_loads(pool, path, [0])
    pool.run(save, path, [0, 1], process_group=True)
    check_loads(pool, path, [0, 1])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.ckpt"]
