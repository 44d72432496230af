"""A checkpoint that does not fit, or is damaged, is refused on all ranks before anything is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_parts import Part, build, differences, load_checkpoint, make_part, one_device, save_sharded
from pool import WorkerPool

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.storage.folder import is_sharded_checkpoint
from lightning_pp.errors import CheckpointError


def save(path: Path, single_file: bool, weights_only: bool = False, **arguments: Any) -> None:
    part = make_part((2, 1), **arguments)
    if weights_only:
        part.optimizers.clear()
    part.train([0])
    if single_file:
        whole = part.whole()
        if weights_only:
            del whole["optimizer_states"]
        if torch.distributed.get_rank() == 0:
            torch.save({**whole, "epoch": 1}, path)
    else:
        save_sharded(path, part.held, {"epoch": 1})


def load(path: Path, evaluate: bool = False, change: str = "", **arguments: Any) -> tuple[str, bool, dict[str, Any]]:
    """Returns the error's text, whether anything changed, and the whole state afterwards."""
    strict = arguments.pop("strict", True)
    weights_only = arguments.pop("weights_only", False)
    part = make_part((2, 1), **arguments)
    if change == "groups":
        catalog, optimizer = part.catalog, part.optimizers[0]
        optimizer.param_groups[0]["params"] += optimizer.param_groups.pop(1)["params"]
        (groups,) = catalog.optimizer_groups
        part.catalog = ParameterCatalog(
            catalog.names, catalog.owners, catalog.shapes, catalog.canonical, ((groups[0] + groups[1],),)
        )
    before = state_of(part)
    held = replace(part.held, optimizers=[]) if evaluate else part.held
    try:
        load_checkpoint(path, held, strict=strict, weights_only=weights_only)
    except CheckpointError as error:
        return str(error), bool(differences(state_of(part), before)), {}
    return "", bool(differences(state_of(part), before)), part.whole()


def state_of(part: Part) -> dict[str, Any]:
    tensors = {
        name: tensor.detach().clone() for name, tensor in part.module.state_dict().items() if torch.is_tensor(tensor)
    }
    return {"module": tensors, "optimizers": [optimizer.state_dict() for optimizer in part.optimizers]}


def check_refused(pool: WorkerPool, path: Path, *parts: str, **arguments: Any) -> str:
    """Both ranks raise the same error, which has these parts, and have changed nothing."""
    results = pool.run(load, path, process_group=True, **arguments)
    texts = [text for text, _, _ in results]
    assert texts[0] == texts[1]
    assert str(path) in texts[0]
    for part in parts:
        assert part in texts[0], texts[0]
    assert not any(changed for _, changed, _ in results)
    return texts[0]


@pytest.fixture(scope="module", params=[False, True], ids=["sharded", "single_file"])
def checkpoint(
    request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Saves a checkpoint of a model, once for all tests, in each format."""

    @cache
    def make(**arguments: Any) -> Path:
        path = tmp_path_factory.mktemp("saved") / "model.ckpt"
        pool.run(save, path, request.param, process_group=True, **arguments)
        assert is_sharded_checkpoint(path) != request.param
        return path

    return make


def test_other_model(pool: WorkerPool, checkpoint: Callable[..., Path]) -> None:
    """More names than fit a message are counted; what is not strict takes what fits."""
    path = checkpoint(num_blocks=1)
    text = check_refused(
        pool, path, "16 of the model's 29 names are missing: blocks.1.linear", "strict_loading = False"
    )
    assert text.count("blocks.") == 10 and "blocks.2.linear.bias and 6 more" in text
    results = pool.run(load, path, strict=False, evaluate=True, process_group=True)
    assert all(changed for _, changed, _ in results)
    loaded = results[0][2]["state_dict"]
    saved, fresh = one_device([0], num_blocks=1)["state_dict"], build().state_dict()
    expected = type(fresh)((name, saved.get(name, fresh[name])) for name in fresh)
    assert not differences(loaded, expected)

    unexpected = "8 of its 29 names are unexpected: "
    check_refused(pool, checkpoint(), unexpected, "blocks.2.norm.running_var", num_blocks=2)


def test_other_shapes(pool: WorkerPool, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    for strict in (True, False):
        text = check_refused(
            pool,
            path,
            "2 have another shape",
            "norm.weight ((5,) in the checkpoint, (7,) in the model)",
            width_of_norm=7,
            strict=strict,
        )
        assert "strict_loading" not in text


def test_optimizer_state_that_is_not_there(pool: WorkerPool, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(weights_only=True)
    check_refused(pool, path, "has no optimizer state", "save_weights_only=True")
    (text, changed, _), _ = pool.run(load, path, evaluate=True, process_group=True)
    assert (text, changed) == ("", True)


def test_other_parameter_groups(pool: WorkerPool, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    check_refused(pool, path, "parameter groups of [4, 11] parameters, but the model's has [15]", change="groups")


def test_objects_that_weights_only_forbids(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "callback": Path("b")}, path)
    check_refused(pool, path, "pass weights_only=False", weights_only=True)


@pytest.mark.parametrize("keep", [0, 100, -200])
def test_damaged_single_file(pool: WorkerPool, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(one_device([0]), path)
    path.write_bytes(path.read_bytes()[:keep])
    check_refused(pool, path, "is damaged or not a checkpoint", f"{path.stat().st_size} bytes")


def test_no_such_file(pool: WorkerPool, tmp_path: Path) -> None:
    check_refused(pool, tmp_path / "a.ckpt", "does not exist")
    path = tmp_path / "b.ckpt"
    torch.save({"weights": {}}, path)
    check_refused(pool, path, "has no 'state_dict'")


@pytest.fixture
def folder(pool: WorkerPool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a sharded checkpoint."""
    saved = tmp_path_factory.getbasetemp() / "whole.ckpt"
    if not saved.exists():
        pool.run(save, saved, single_file=False, process_group=True)
    return Path(shutil.copytree(saved, tmp_path / "a.ckpt"))


@pytest.mark.by_day(5)
@pytest.mark.parametrize("file", [".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_folder(pool: WorkerPool, folder: Path, file: str, damage: str) -> None:
    if damage == "missing":
        (folder / file).unlink()
    else:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])
    check_refused(pool, folder, str(folder / file), "use another")


def test_garbled_shard(pool: WorkerPool, folder: Path) -> None:
    """Damage that no size shows is found while reading; the message still names the file."""
    file = folder / "__1_0.distcp"
    file.write_bytes(bytes(len(file.read_bytes())))
    for text, _, _ in pool.run(load, folder, process_group=True):
        assert f"{file} cannot be read" in text


def test_folder_that_is_no_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    check_refused(pool, tmp_path, "is not a complete checkpoint")
    assert not is_sharded_checkpoint(tmp_path)


def save_unknown_names(path: Path) -> None:
    part = make_part((2, 1))
    part.module.register_buffer("late", torch.zeros(1))
    save_sharded(path, part.held, {})


def test_names_that_appear_after_the_split(pool: WorkerPool, tmp_path: Path) -> None:
    for message in pool.refusals("CheckpointError", save_unknown_names, tmp_path / "a", process_group=True):
        assert "1 names that the module did not have when it was split: late" in message
    assert list(tmp_path.iterdir()) == []


def test_catalog_of_tied_names() -> None:
    module = build()
    names = tuple(module.state_dict())
    catalog = ParameterCatalog.from_module(module, lambda name: (0,))
    assert catalog.canonical == {"head.weight": "embedding.weight"}
    assert catalog.names == names
    assert "blocks.0.counter._extra_state" not in catalog.shapes
