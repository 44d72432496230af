"""Saving sharded checkpoints: every rank writes what it holds, under names that mean the same in every layout."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.local import (
    by_canonical_name,
    local_parameters,
    local_state_dict,
    read_optimizer,
    to_save,
)
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage import planner as storage
from lightning_pp.checkpoint.storage.planner import KeyPath, TyingWriter
from lightning_pp.errors import CheckpointError

MODEL = "state_dict"


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether this is a folder that a sharded checkpoint was saved to, complete or not."""
    return any((Path(path) / name).is_file() for name in (folder.TABLE_FILENAME, folder.REST_FILENAME))


@dataclass(frozen=True)
class ShardedSave:
    """A save of which only the writing is left to do.

    Attributes:
        path: Where the folder goes.
        entries: What this rank holds, by its path in the checkpoint.
        rest: On the root the pickled rest of the checkpoint.
        tied: For each container of names, the further names of tied parameters and what they stand for.
        order: The paths of the model's names in its own order.
        is_root: Whether this rank makes and moves the folder.
    """

    path: Path
    entries: Mapping[KeyPath, Any]
    rest: bytes
    tied: Mapping[KeyPath, KeyPath]
    order: Sequence[KeyPath]
    is_root: bool

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the folder and put it in its place. Collective over all ranks.

        ::

            root:  make an empty folder beside ``path``; write ``rest`` into it
            all:   write own shards; the first owner of a name writes it, spread over its data-parallel ranks
            root:  write the table of contents; move the folder to ``path``; remove the one that was there

        Args:
            group: All ranks; for a thread beside the training a group of its own, which it may not share.

        Raises:
            CheckpointError: On all ranks, if one of them failed; what was at ``path`` is untouched then.
        """
        staged = folder.staging_path(self.path)
        try:
            with fail_together(group):
                if self.is_root:
                    folder.begin(self.path)
                    _write_through(self.rest, staged / folder.REST_FILENAME)
            with fail_together(group):
                if not staged.is_dir():
                    raise CheckpointError(
                        f"{staged}, made by the first rank, is not visible here: sharded checkpoints need a file "
                        "system that all nodes share; choose a path on one, or set save_distributed_checkpoint=False"
                    )
            storage.save(self.entries, TyingWriter(staged, self.tied, self.order), group)
            with fail_together(group):
                if self.is_root:
                    folder.commit(self.path)
        except BaseException:
            if self.is_root:
                folder.abandon(self.path)
            raise


def save_sharded(path: str | os.PathLike[str], **what: Any) -> None:
    """Save a folder that replaces what is at ``path`` once all ranks have finished. Collective over all ranks.

    Args:
        path: As in :func:`prepare_save`, as are the other arguments and errors.
        what: The arguments of :func:`prepare_save`.
    """
    prepare_save(path, **what).write()


def prepare_save(
    path: str | os.PathLike[str],
    *,
    module: Module,
    optimizers: Sequence[Optimizer],
    catalog: ParameterCatalog,
    mesh: DeviceMesh,
    rest: Mapping[str, Any],
    state_dict: Mapping[str, Any] | None = None,
    further_states: Mapping[str, Mapping[str, Any]] | None = None,
    stager: DefaultStager | None = None,
) -> ShardedSave:
    """Collect what a sharded checkpoint is to hold. Collective over all ranks; nothing is written yet.

    Args:
        path: On a file system that all ranks share; the root's counts.
        module: This rank's part of the module; its own parameters are tensors or DTensors over the data-parallel axes.
        optimizers: With this rank's parameters in the groups that a single device would have; empty to save weights
            only.
        catalog: The unsplit module.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks.
        rest: Whatever else the checkpoint has; picklable; the root's counts.
        state_dict: What to save in place of the module's own tensors, such as averaged weights; in the form of
            :func:`~lightning_pp.checkpoint.ownership.local.local_state_dict`.
        further_states: More of that form, saved beside ``state_dict`` under the name given.
        stager: Copies tensors to the host, so that training may go on while they are written. Without one, the tensors
            must not change before they are.

    Raises:
        CheckpointError: On all ranks: a name is missing or unknown, or something cannot be pickled.
    """
    ranks = Ranks.from_mesh(mesh)
    path = _local_path(from_root(os.fspath(path), ranks))
    with fail_together():
        entries: dict[KeyPath, Any] = {}
        tied: dict[KeyPath, KeyPath] = {}
        order: list[KeyPath] = []
        for container, state in {MODEL: state_dict, **(further_states or {})}.items():
            values = local_state_dict(module, catalog)
            if state is not None:
                values = by_canonical_name(state, catalog)
            # Extra state is one object even where it holds tensors: it goes back as get_extra_state gave it.
            mine = to_save(values, catalog, ranks.pipeline_rank)
            entries.update({(container, name): value for name, value in mine.items()})
            tied.update({(container, alias): (container, first) for alias, first in catalog.canonical.items()})
            order.extend((container, name) for name in catalog.names)
        entries.update(_optimizer_entries(module, optimizers, catalog, ranks))
        pickled = _pickled(rest) if ranks.is_root else b""
        if stager is not None:
            entries = dict(zip(entries, _staged(list(entries.values()), stager), strict=True))
    return ShardedSave(path, entries, pickled, tied, order, ranks.is_root)


def make_stager() -> DefaultStager:
    """Copies to the host memory that it keeps for the next save; pinned where there is CUDA."""
    is_cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_cuda,
        )
    )


def _staged(values: list[Any], stager: DefaultStager) -> list[Any]:
    staged = stager.stage({str(number): value for number, value in enumerate(values)})
    assert isinstance(staged, dict)
    return list(staged.values())


def _optimizer_entries(
    module: Module, optimizers: Sequence[Optimizer], catalog: ParameterCatalog, ranks: Ranks
) -> dict[KeyPath, Any]:
    entries: dict[KeyPath, Any] = {}
    parameters = local_parameters(module, catalog)
    for index, optimizer in enumerate(optimizers):
        part, prefix = read_optimizer(optimizer, parameters), f"optimizer_{index}"
        for name, state in part.state.items():
            if catalog.saver(name) == ranks.pipeline_rank:
                entries.update(storage.flatten((prefix, "state", name), state))
        if ranks.is_root:
            for number, (group, names) in enumerate(zip(part.groups, catalog.optimizer_groups[index], strict=True)):
                for key, value in {**group, "params": list(names)}.items():
                    entries[prefix, "param_groups", number, key] = value
    return entries


def _pickled(rest: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(dict(rest), stream)
    return stream.getvalue()


def _write_through(content: bytes, file: Path) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _local_path(path: str) -> Path:
    if "://" in path:
        raise CheckpointError(
            f"{path} is not a path: sharded checkpoints are saved to and loaded from file systems only"
        )
    return Path(path)
