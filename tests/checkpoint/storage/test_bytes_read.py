"""Loading reads what a rank owns and no more, whatever the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_parts import save_sharded
from pool import WorkerPool
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.checkpoint.reading.initial_weights import load_weights
from lightning_pp.checkpoint.reading.open import open_checkpoint

LAYERS, ROWS, COLUMNS = 6, 8192, 512  # 16 MiB each: Linux maps up to 2 MiB around what is touched
WHOLE = LAYERS * ROWS * COLUMNS * 4


def make_rank(layout: tuple[int, int]) -> RankPart:
    """This rank's layers, sharded over its replicas."""
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("pipeline", "data_parallel"))
    rank_of = {f"layers.{layer}.weight": layer * layout[0] // LAYERS for layer in range(LAYERS)}
    module = nn.Module()
    own = [name.split(".")[1] for name, rank in rank_of.items() if rank == mesh.get_local_rank("pipeline")]
    module.layers = nn.ModuleDict({layer: nn.Linear(COLUMNS, ROWS, bias=False) for layer in own})
    if layout[1] > 1:
        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh["data_parallel"])
    shapes = dict.fromkeys(rank_of, torch.Size([ROWS, COLUMNS]))
    catalog = ParameterCatalog(tuple(rank_of), {name: (rank,) for name, rank in rank_of.items()}, shapes)
    return RankPart(module, catalog, mesh)


def state() -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.weight": torch.full((ROWS, COLUMNS), float(layer)) for layer in range(LAYERS)}


def save_folder(path: Path, layout: tuple[int, int]) -> None:
    part = make_rank(layout)
    values = {name: value for name, value in state().items() if name in part.parameters()}
    for name, parameter in part.module.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.data.fill_(float(values[name][0, 0]))
    save_sharded(path, part, {})


def bytes_mapped(folder: Path) -> int:
    """Bytes of files below ``folder`` that this process has in memory through mappings."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            counts = str(folder) in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def bytes_read() -> int:
    """Bytes that this process has asked the system to read."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def load(path: Path, layout: tuple[int, int]) -> tuple[int, int]:
    """Returns the bytes of the checkpoint that were touched or read, and those of the parameters here."""
    part = make_rank(layout)
    before = bytes_read()
    if path.suffix == ".ckpt":
        opened = open_checkpoint(path, part.mesh)
        opened.load(part)
        touched = bytes_mapped(path.parent)
        del opened
    else:
        from lightning_pp.checkpoint.reading import initial_weights

        kept: list[Any] = []
        original = initial_weights._by_name_of_model

        def keep(*arguments: Any) -> Any:
            kept.append(original(*arguments))
            return kept[0]

        initial_weights._by_name_of_model = keep  # the mappings live as long as their tensors
        try:
            load_weights(path, part)
        finally:
            initial_weights._by_name_of_model = original
        touched = bytes_mapped(path.parent)
    own = 0
    for name, parameter in part.module.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        assert bool((local == float(name.split(".")[1])).all())
        own += local.numel() * local.element_size()
    return touched + bytes_read() - before, own


KINDS = ("folder", "file", "safetensors", "shards")


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, (2, 2)) for kind in KINDS]
    + [pytest.param(kind, layout, marks=pytest.mark.nightly) for kind in KINDS for layout in ((2, 1), (1, 2))],
)
def test_a_rank_reads_what_it_owns(pool: WorkerPool, tmp_path: Path, kind: str, layout: tuple[int, int]) -> None:
    if kind == "file":
        path = tmp_path / "a.ckpt"
        torch.save({"state_dict": state()}, path)
    elif kind == "folder":
        path = tmp_path / "a.ckpt"
        pool.run(save_folder, path, (1, 2), process_group=True)
    elif kind == "safetensors":
        path = tmp_path / "a.safetensors"
        save_file(state(), path)
    else:
        path = tmp_path / "hf"
        path.mkdir()
        for layer, (name, value) in enumerate(state().items()):
            save_file({name: value}, path / f"{layer}.safetensors")
        places = {name: f"{layer}.safetensors" for layer, name in enumerate(state())}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for touched, own in pool.run(load, path, layout, world_size=layout[0] * layout[1], process_group=True):
        assert own == WHOLE // (layout[0] * layout[1])
        # what torch.save wrote is read twice: compared with its checksums, and then loaded
        times = 2.7 if path.suffix == ".ckpt" else 1.3
        assert own * 0.95 < touched < own * times + 1_000_000, f"{touched} bytes for {own} of {WHOLE}"
