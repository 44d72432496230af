"""Saving sharded checkpoints: every rank writes what it holds, under names that mean the same in every layout."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from upath import UPath

from lightning_pp.checkpoint.content import CURRENT_MODEL, MODEL, OPTIMIZERS
from lightning_pp.checkpoint.ownership.cuts import blocks_of
from lightning_pp.checkpoint.ownership.rank_part import (
    RankPart,
    by_canonical_name,
    group_settings,
    is_wrapped,
    read_optimizer,
    to_save,
)
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.storage import folder, remote_folder
from lightning_pp.checkpoint.storage import torch_storage as storage
from lightning_pp.checkpoint.storage.location import Location, locate
from lightning_pp.checkpoint.storage.torch_storage import Blocks, KeyPath, RemoteWriter, TyingWriter
from lightning_pp.errors import CheckpointError
from lightning_pp.tensor.parts import TensorPart


@dataclass(frozen=True)
class ShardedSave:
    """A prepared save: only the writing is left.

    Attributes:
        path: Where the folder goes.
        entries: What this rank holds, by its path in the checkpoint.
        trainer_state: On the root, pickled, what the Trainer keeps beside model and optimizers.
        tied: For each container of names, the further names of tied parameters and what they stand for.
        order: The paths of the model's names in its own order.
        is_root: Whether this rank makes and moves the folder.
        parts: How entries are cut over tensor ranks, of those that are.
    """

    path: Location
    entries: Mapping[KeyPath, Any]
    trainer_state: bytes
    tied: Mapping[KeyPath, KeyPath]
    order: Sequence[KeyPath]
    is_root: bool
    parts: Mapping[KeyPath, TensorPart]

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the folder and put it in its place. Collective over all ranks.

        At a path::

            root:  make an empty folder beside ``path``; write ``trainer_state`` into it
            all:   write own shards; the first owner of a name writes it, spread over its data-parallel ranks
            root:  write the table of contents; move the folder to ``path``; remove the one that was there

        At a URL::

            all:   write own shards under new names
            root:  write ``trainer_state``, and then the table; remove the files of the checkpoint that was there

        Args:
            group: All ranks; for a thread beside the training a group of its own, which it may not share.

        Raises:
            CheckpointError: On all ranks, if one of them failed; what was at ``path`` is untouched then.
        """
        if isinstance(self.path, Path):
            self._write_local(self.path, group)
        else:
            self._write_remote(self.path, group)

    def _blocks(self) -> dict[KeyPath, Blocks]:
        return {path: (part.shape, blocks_of(self.entries[path], part)) for path, part in self.parts.items()}

    def _write_local(self, path: Path, group: dist.ProcessGroup | None) -> None:
        staged = folder.staging_path(path)
        try:
            with fail_together(group):
                if self.is_root:
                    folder.begin(path)
                    with (staged / folder.TRAINER_STATE_FILENAME).open("wb") as stream:
                        stream.write(self.trainer_state)
                        stream.flush()
                        os.fsync(stream.fileno())
            with fail_together(group):
                if not staged.is_dir():
                    raise CheckpointError(
                        f"The first rank made {staged}, but this rank cannot see it. Sharded checkpoints need a file "
                        "system that all nodes share. Choose a path on one, or set save_distributed_checkpoint=False"
                    )
            storage.save(self.entries, TyingWriter(staged, self.tied, self.order), group, self._blocks())
            with fail_together(group):
                if self.is_root:
                    folder.commit(path)
        except BaseException:
            if self.is_root:
                folder.abandon(path)
            raise

    def _write_remote(self, path: UPath, group: dist.ProcessGroup | None) -> None:
        writer = RemoteWriter(path, self.tied, self.order)
        try:
            with fail_together(group):
                if self.is_root:
                    remote_folder.begin(path)
            storage.save(self.entries, writer, group, self._blocks())
            with fail_together(group):
                if self.is_root:
                    remote_folder.stage(path, writer.save_id, self.trainer_state, writer.table)
        except BaseException:
            if self.is_root:
                remote_folder.abandon(path, writer.save_id)
            raise
        # whether a table whose put fails is there is not known, so what it names stays
        with fail_together(group):
            if self.is_root:
                remote_folder.commit(path, writer.save_id, self.trainer_state, writer.table)


def prepare_save(
    path: str | os.PathLike[str], part: RankPart, checkpoint: Mapping[str, Any], stager: DefaultStager | None = None
) -> ShardedSave:
    """Collect what a sharded checkpoint is to hold. Collective over all ranks; nothing is written yet.

    Args:
        path: A path on a file system that all ranks share, or a URL; the root's counts.
        part: What this rank holds; its optimizers are saved if ``checkpoint`` has ``optimizer_states``, of whatever
            content.
        checkpoint: What the Trainer has put together. Its ``state_dict``, and ``current_model_state`` if it is there,
            are in the form of :meth:`RankPart.local_state_dict`; the rest is picklable, and the root's counts.
        stager: Copies tensors to the host. Without one, they must not change before they are written.

    Raises:
        CheckpointError: On all ranks: a name is missing or unknown, or something cannot be pickled.
    """
    ranks, catalog = Ranks.from_mesh(part.mesh), part.catalog
    path = from_root(str(path), ranks)
    settings = [group_settings(optimizer) for optimizer in part.optimizers] if OPTIMIZERS in checkpoint else []
    with fail_together():
        location = locate(path)
        entries: dict[KeyPath, Any] = {}
        tied: dict[KeyPath, KeyPath] = {}
        order: list[KeyPath] = []
        for container in (MODEL, CURRENT_MODEL) if CURRENT_MODEL in checkpoint else (MODEL,):
            # Extra state is one object even where it holds tensors: it goes back as get_extra_state gave it.
            mine = to_save(by_canonical_name(checkpoint[container], catalog), catalog, ranks.pipeline_rank)
            entries.update({(container, name): value for name, value in mine.items()})
            tied.update({(container, alias): (container, first) for alias, first in catalog.canonical.items()})
            order.extend((container, name) for name in catalog.names)
        if OPTIMIZERS in checkpoint:
            entries.update(_optimizer_entries(part, ranks, settings))
        # (container, name), and (optimizer, "state", name, ...)
        found = {path: part.cuts.of(str(path[1 if len(path) == 2 else 2]), value) for path, value in entries.items()}
        in_shards = (MODEL, CURRENT_MODEL, OPTIMIZERS)
        trainer_state = {key: value for key, value in checkpoint.items() if key not in in_shards}
        stream = io.BytesIO()
        if ranks.is_root:
            torch.save(trainer_state, stream)
        if stager is not None:
            staged = stager.stage({str(number): v for number, v in enumerate(entries.values()) if not is_wrapped(v)})
            assert isinstance(staged, dict)
            entries = {
                path: pickle.loads(pickle.dumps(value)) if is_wrapped(value) else staged[str(number)]
                for number, (path, value) in enumerate(entries.items())
            }
    parts = {path: part for path, part in found.items() if part is not None}
    return ShardedSave(location, entries, stream.getvalue(), tied, order, ranks.is_root, parts)


def make_stager() -> DefaultStager:
    """Copies to the host memory that it keeps for the next save; pinned where there is CUDA."""
    is_cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=is_cuda
        )
    )


def _optimizer_entries(part: RankPart, ranks: Ranks, settings: Sequence[Any]) -> dict[KeyPath, Any]:
    entries: dict[KeyPath, Any] = {}
    for index, optimizer in enumerate(part.optimizers):
        own, prefix = read_optimizer(optimizer, part.parameters()), f"optimizer_{index}"
        for name, state in own.state.items():
            if part.catalog.saver(name) == ranks.pipeline_rank:
                entries.update(storage.flatten((prefix, "state", name), state))
        groups = zip(settings[index], part.catalog.optimizer_groups[index], strict=True)
        for number, (group, names) in enumerate(groups if ranks.is_root else ()):
            for key, value in {**group, "params": list(names)}.items():
                entries[prefix, "param_groups", number, key] = value
    return entries
