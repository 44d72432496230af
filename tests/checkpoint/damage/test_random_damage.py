"""Random damage to any file of a checkpoint: what is read is right, or refused with the file; never something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from damage_parts import read, save_both
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_parts import differences
from pool import WorkerPool

from lightning_pp.errors import CheckpointError

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return save_both(pool, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(
    "single_file", [pytest.param(False, id="sharded", marks=pytest.mark.nightly), pytest.param(True, id="single_file")]
)
@FUZZ
@given(data=st.data())
def test_random_damage(saved: dict[bool, Path], tmp_path: Path, single_file: bool, data: st.DataObject) -> None:
    """Bytes are changed, cut off, taken out or put in, anywhere in any file."""
    original, path = saved[single_file], tmp_path / "a.ckpt"
    expected = read(original)
    if single_file:
        shutil.copy(original, path)
        file = path
    else:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = file.read_bytes()
    kind = data.draw(st.sampled_from(["change", "cut", "take", "put"]))
    start = data.draw(st.integers(0, len(content) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=8))
    changed = {
        "change": content[:start] + noise + content[start + len(noise) :],
        "cut": content[:start],
        "take": content[:start] + content[start + len(noise) :],
        "put": content[:start] + noise + content[start:],
    }[kind]
    file.write_bytes(changed)
    text = ""
    try:
        found = read(path)
    except CheckpointError as error:
        text = str(error)
    assert str(path) in text if text else not differences(found, expected)
