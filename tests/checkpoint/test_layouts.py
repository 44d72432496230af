"""A checkpoint that one layout saved loads under any other, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_parts import differences, load_checkpoint, make_part, one_device, save_sharded, world_size
from pool import WorkerPool
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh

from lightning_pp.checkpoint.ownership.ranks import Ranks, gather_entries

TRAINER_STATE = {"epoch": 3, "loops": {"fit_loop": [1, 2]}, "hyper_parameters": {"name": Path("a")}}


def train_and_save(
    path: Path,
    layout: Sequence[int],
    steps: Sequence[int],
    single_file: bool = False,
    resume: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Resume from ``path`` if told, take the steps, save to ``path``; returns what a single device would have."""
    part = make_part(layout, **arguments)
    if resume:
        torch.manual_seed(99)  # nothing may depend on what was there before
        for tensor in [*part.module.parameters(), *part.module.buffers()]:
            tensor.data.fill_(-55)
        assert load_checkpoint(path, part.held) == TRAINER_STATE
        for name, buffer in part.module.named_buffers():
            assert (buffer != -55).all(), name
            assert (buffer != -77).all(), name
        assert all(block.counter.state["count"] == 0 for block in part.module.blocks)
    part.train(steps)
    whole = part.whole()
    if single_file:
        if torch.distributed.get_rank() == 0:
            torch.save({**whole, **TRAINER_STATE}, path)
        torch.distributed.barrier()
    else:
        save_sharded(path, part.held, TRAINER_STATE)
    return whole


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("optimizer", "single_file"),
    [
        ("adamw", False),
        ("adamw", True),
        ("sgd", False),
        ("adagrad", True),
        ("adamw_named", False),
        pytest.param("sgd", True, marks=pytest.mark.nightly),
        pytest.param("adagrad", False, marks=pytest.mark.nightly),
        pytest.param("adamw_named", True, marks=pytest.mark.nightly),
    ],
)
def test_resume_through_three_layouts(pool: WorkerPool, tmp_path: Path, optimizer: str, single_file: bool) -> None:
    # torch refuses an empty parameter group next to one with names; four ranks would have one
    middle = (1, 2) if optimizer == "adamw_named" else (4, 1)
    path = tmp_path / "model.ckpt"
    arguments: dict[str, Any] = {"optimizer": optimizer, "single_file": single_file, "process_group": True}
    for index, layout in enumerate([(2, 2), middle, (1, 1)]):
        steps = [2 * index, 2 * index + 1]
        size = world_size(layout)
        wholes = pool.run(train_and_save, path, layout, steps, resume=index > 0, world_size=size, **arguments)
        assert not differences(wholes[0], one_device(range(2 * index + 2), optimizer=optimizer))
        assert all(whole == {"state_dict": {}, "optimizer_states": [{}]} for whole in wholes[1:])


@pytest.mark.by_day(2)
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_saves_the_same(pool: WorkerPool, tmp_path: Path, layout: tuple[int, int], tied: bool) -> None:
    arguments: dict[str, Any] = {"tied": tied, "process_group": True}
    pool.run(train_and_save, tmp_path / "a", layout, [0], **arguments)
    wholes = pool.run(train_and_save, tmp_path / "a", (1, 1), [1], resume=True, world_size=1, **arguments)
    expected = one_device([0, 1], tied=tied)
    assert not differences(wholes[0], expected)
    shared = wholes[0]["state_dict"]["head.weight"] is wholes[0]["state_dict"]["embedding.weight"]
    assert shared == tied


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_nothing_is_saved_twice(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    """Replicas, tied names and parameters of two stages share bytes, and the ranks share the work; shards load it."""
    arguments: dict[str, Any] = {"world_size": 4, "process_group": True}
    pool.run(train_and_save, tmp_path / "a", (2, 2), [0], sharded=sharded, **arguments)
    table = FileSystemReader(tmp_path / "a").read_metadata()
    stored = {(item.relative_path, item.offset): item.length for item in table.storage_data.values()}
    files = {file.name: file.stat().st_size for file in (tmp_path / "a").glob("*.distcp")}
    assert sum(stored.values()) == sum(files.values())
    assert len(files) == 4
    places: dict[str, set[Any]] = {}
    for index, item in table.storage_data.items():
        places.setdefault(index.fqn, set()).add((item.relative_path, item.offset))
    assert places["state_dict.head.weight"] == places["state_dict.embedding.weight"]
    chunks = {
        name: len(table.state_dict_metadata[f"state_dict.{name}"].chunks) for name in ("head.weight", "temperature")
    }
    assert chunks == {"head.weight": 2 if sharded else 1, "temperature": 1}
    assert "optimizer_0.state.embedding.weight.exp_avg" in places
    assert not [key for key in places if key.startswith("optimizer_0.state.head.weight")]
    wholes = pool.run(train_and_save, tmp_path / "a", (2, 2), [1], resume=True, **arguments)
    assert not differences(wholes[0], one_device([0, 1]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "single_file"])
def test_hybrid_sharding(pool: WorkerPool, tmp_path: Path, single_file: bool) -> None:
    """Parameters that are replicated over one axis of data parallelism and sharded over another."""
    arguments: dict[str, Any] = {"world_size": 4, "single_file": single_file, "process_group": True}
    pool.run(train_and_save, tmp_path / "a", (1, 2, 2), [0], **arguments)
    wholes = pool.run(train_and_save, tmp_path / "a", (1, 2, 2), [1], resume=True, **arguments)
    assert not differences(wholes[0], one_device([0, 1]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("single_file", [False, True], ids=["sharded", "single_file"])
def test_optimizer_state_of_any_form(pool: WorkerPool, tmp_path: Path, single_file: bool) -> None:
    """Tensors of other shapes than the parameters', nests of sharded tensors, and objects."""
    arguments: dict[str, Any] = {"optimizer": "row_normalized", "single_file": single_file, "process_group": True}
    for index, layout in enumerate([(1, 2), (1, 2), (2, 1)]):
        whole = pool.run(train_and_save, tmp_path / "a", layout, [index], resume=index > 0, **arguments)[0]
        expected = one_device(range(index + 1), optimizer="row_normalized")
        assert not differences(whole, expected)
    kept = expected["optimizer_states"][0]["state"][0]
    assert kept["row_mean"].shape == (11, 1)
    assert len(kept["last"]["gradients"]) == 2
    assert kept["note"] == {"steps": 3, "empty": {}}


def exchange() -> dict[Any, Any]:
    ranks = Ranks.from_mesh(init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data_parallel")))
    return gather_entries({(ranks.pipeline_rank, key): value for key, value in odd_values().items()}, ranks)


def odd_values() -> dict[str, Any]:
    return {
        "bfloat16": torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "transposed": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor(1 + 2j),
        "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "integer": torch.tensor(2**40),
        "empty": torch.empty(0, 4),
        "object": {"nested": [torch.ones(2), "text"]},
    }


def test_tensors_of_any_dtype_are_sent(pool: WorkerPool) -> None:
    gathered, nothing = pool.run(exchange, process_group=True)
    assert nothing == {}
    expected = {(rank, key): value for rank in range(2) for key, value in odd_values().items()}
    assert gathered.keys() == expected.keys()
    for key, value in expected.items():
        if key[1] == "float8":
            assert gathered[key].dtype == value.dtype
            assert torch.equal(gathered[key].float(), value.float())
        else:
            assert not differences(gathered[key], value)
