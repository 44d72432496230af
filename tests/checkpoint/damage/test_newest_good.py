"""The newest checkpoint that is not damaged is found among many."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from damage_parts import flip, position_of, save
from pipeline_parts import make_part
from pool import WorkerPool

from lightning_pp.checkpoint.ownership.ranks import Ranks
from lightning_pp.checkpoint.reading.newest_good import checkpoints_in, newest_good
from lightning_pp.checkpoint.reading.open import read_alone
from lightning_pp.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, ``0.ckpt`` the oldest; the newest is a single file, and there is a link to it."""
    where = tmp_path_factory.mktemp("saved") / "checkpoints"
    where.mkdir(parents=True)
    pool.run(save, where / "1.ckpt", False, process_group=True)
    shutil.copytree(where / "1.ckpt", where / "0.ckpt")
    pool.run(save, where / "2.ckpt", True, process_group=True)
    for age, table in enumerate((where / "0.ckpt/.metadata", where / "1.ckpt/.metadata", where / "2.ckpt")):
        os.utime(table, (1_000_000 + age, 1_000_000 + age))
    (where / "last.ckpt").symlink_to("2.ckpt")
    (where / "unfinished.ckpt").mkdir()
    (where / "unfinished.ckpt" / "__0_0.distcp").write_bytes(b"of a save that was killed")
    (where / "notes.txt").write_text("no checkpoint")
    return where


@pytest.fixture
def run_folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / "checkpoints", symlinks=True))


def weight_of(path: Path) -> torch.Tensor:
    weight: torch.Tensor = read_alone(path, weights_only=False)["state_dict"]["blocks.2.linear.weight"]
    return weight


def damage(path: Path) -> Path:
    """Flips a bit of a weight; returns the file."""
    weight = weight_of(path)
    for file in [path] if path.is_file() else sorted(path.glob("*.distcp")):
        if weight.numpy().tobytes() in file.read_bytes():
            flip(file, position_of(file, weight))
            return file
    raise AssertionError("no file has the weight")


def together(where: Path) -> tuple[str, list[str]]:
    ranks = Ranks.from_mesh(make_part((2, 1)).mesh)
    found = newest_good(where if ranks.is_root else [], ranks=ranks)
    return found.path.name, [reason for _, reason in found.damaged]


def test_newest_first(run_folder: Path) -> None:
    expected = [run_folder / name for name in ("2.ckpt", "1.ckpt", "0.ckpt")]
    for where in (run_folder, run_folder.parent, str(run_folder)):
        assert checkpoints_in(where) == expected
    found = newest_good(run_folder.parent)
    assert found.path == expected[0] and found.damaged == ()


def test_damaged_ones_are_passed_over(run_folder: Path, pool: WorkerPool) -> None:
    files = [damage(run_folder / "2.ckpt")]
    found = newest_good(run_folder)
    assert found.path == run_folder / "1.ckpt"
    ((path, reason),) = found.damaged
    assert path == files[0] and str(files[0]) in reason and re.search(r"\(CRC-32\) [0-9a-f]{8}: BadZipFile", reason)

    files.append(damage(run_folder / "1.ckpt"))
    found = newest_good(run_folder)
    assert found.path == run_folder / "0.ckpt"
    assert "state_dict.blocks.2.linear.weight" in found.damaged[1][1] and str(files[1]) in found.damaged[1][1]

    for name, reasons in pool.run(together, run_folder, process_group=True):
        assert name == "0.ckpt"
        assert [str(file) in reason for file, reason in zip(files, reasons, strict=True)] == [True, True]


def test_none_is_good(run_folder: Path, tmp_path: Path) -> None:
    for name in ("0.ckpt", "1.ckpt", "2.ckpt"):
        damage(run_folder / name)
    with pytest.raises(CheckpointError, match="None of 3 checkpoints") as error:
        newest_good(run_folder)
    assert all(str(run_folder / name) in str(error.value) for name in ("0.ckpt", "1.ckpt", "2.ckpt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        newest_good(tmp_path / "empty")


def test_at_urls(run_folder: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.put(str(run_folder), "/damage/checkpoints", recursive=True)
    try:
        newest = [str(path) for path in checkpoints_in("memory://damage")]
        assert {path.rpartition("/")[2] for path in newest} >= {"0.ckpt", "1.ckpt", "2.ckpt"}
        assert newest_good("memory://damage").damaged == ()
        folders = [path for path in checkpoints_in("memory://damage") if path.name in ("0.ckpt", "1.ckpt")]
        shard = next(name for name in files.ls(folders[0].path, detail=False) if name.endswith(".distcp"))
        content = bytearray(files.cat_file(shard))
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        files.pipe_file(shard, bytes(content))
        found = newest_good(folders)
        assert str(found.path) == str(folders[1]) and "cannot be read" in found.damaged[0][1]
    finally:
        files.rm("/damage", recursive=True)
