"""A flipped bit of a weight is refused on all ranks; checkpoints without checksums load."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from damage_parts import flip, load, position_of, read, save_both
from pipeline_parts import differences, one_device
from pool import WorkerPool

from lightning_pp.checkpoint.storage.checksums import unsealed


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return save_both(pool, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "single_file"])
def test_one_flipped_bit_of_a_weight(
    pool: WorkerPool, saved: dict[bool, Path], tmp_path: Path, single_file: bool
) -> None:
    """Only one rank reads it; all ranks raise the same error."""
    path = tmp_path / "a.ckpt"
    (shutil.copy if single_file else shutil.copytree)(saved[single_file], path)
    weight = read(path)["state_dict"]["blocks.2.linear.weight"]
    files = [path] if single_file else sorted(path.glob("*.distcp"))
    (file,) = (file for file in files if weight.numpy().tobytes() in file.read_bytes())
    flip(file, position_of(file, weight))
    (first, _), (second, _) = pool.run(load, path, process_group=True)
    assert first == second and str(file) in first and "differs from what was written, with checksum (CRC-32)" in first
    assert single_file or "state_dict.blocks.2.linear.weight" in first


def test_checkpoints_without_checksums_load(pool: WorkerPool, saved: dict[bool, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    shutil.copytree(saved[False], path)
    table, is_sealed = unsealed((path / ".metadata").read_bytes())
    assert is_sealed
    (path / ".metadata").write_bytes(table)
    for error, whole in pool.run(load, path, process_group=True)[:1]:
        assert not error and not differences(whole, one_device([0]))

    state = {"state_dict": {"weight": torch.arange(4.0)}}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "without.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read(tmp_path / "without.ckpt")["state_dict"]["weight"], torch.arange(4.0))


def test_other_tools_read_the_table(saved: dict[bool, Path]) -> None:
    with (saved[False] / ".metadata").open("rb") as stream:
        assert pickle.load(stream).state_dict_metadata
