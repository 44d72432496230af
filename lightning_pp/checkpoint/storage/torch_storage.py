"""torch.distributed.checkpoint's planner and file storage, adapted.

A checkpoint is a flat table whose keys are paths joined by dots, as Lightning's sharded checkpoints have them::

    state_dict.<name>                       a parameter, buffer or extra state
    optimizer_<i>.state.<name>.<key>        what optimizer i keeps for a parameter
    optimizer_<i>.param_groups.<g>.<key>    a hyper-parameter of its group g; ``params`` has the names
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from upath import UPath

from lightning_pp.checkpoint._torch_private import fsspec_files, tree_leaves
from lightning_pp.checkpoint.storage.checksums import View, check_archive, sealed, unsealed
from lightning_pp.checkpoint.storage.folder import TABLE_FILENAME
from lightning_pp.checkpoint.storage.location import Location, is_remote, naming
from lightning_pp.checkpoint.storage.trusted_pickle import load_table
from lightning_pp.errors import CheckpointError

KeyPath: TypeAlias = tuple["str | int", ...]
Blocks: TypeAlias = tuple[torch.Size, Mapping[tuple[int, ...], torch.Tensor]]
"""The shape of a whole tensor and, by where each begins, the blocks of it that this rank holds."""


def flatten(path: KeyPath, value: Any) -> dict[KeyPath, Any]:
    """Divide a nest of dicts and lists down to its tensors; what holds no tensor stays one object.

    Raises:
        CheckpointError: A sharded tensor sits in another kind of container.
    """
    holds = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if isinstance(value, torch.Tensor) or not holds:
        return {path: value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    elif any(isinstance(leaf, DTensor) for leaf in holds):
        raise CheckpointError(
            f"{'.'.join(map(str, path))} is a {type(value).__name__} of sharded tensors; use a dict or list"
        )
    else:
        return {path: value}
    return {inner: leaf for key, item in items for inner, leaf in flatten((*path, key), item).items()}


def unflatten(leaves: Mapping[KeyPath, Any]) -> Any:
    """Build the nest of dicts and lists whose leaves are at these paths."""
    if () in leaves:
        return leaves[()]
    parts: dict[str | int, dict[KeyPath, Any]] = {}
    for (key, *inner), leaf in leaves.items():
        parts.setdefault(key, {})[tuple(inner)] = leaf
    if all(isinstance(key, int) for key in parts):
        return [unflatten(parts[index]) for index in range(len(parts))] if parts else {}
    return {key: unflatten(inner) for key, inner in parts.items()}


def save(
    entries: Mapping[KeyPath, Any],
    writer: FileSystemWriter,
    group: dist.ProcessGroup | None = None,
    blocks: Mapping[KeyPath, Blocks] | None = None,
) -> None:
    """Save each rank's entries; what several ranks enter under one key is written once.

    Args:
        entries: This rank's entries.
        writer: Writes them.
        group: All ranks; by default the default group.
        blocks: Of entries that are cut over tensor ranks, the blocks that this rank holds.

    Raises:
        CheckpointError: On all ranks, if one of them failed.
    """
    paths = {".".join(map(str, path)): path for path in entries}
    state = {key: entries[path] for key, path in paths.items()}
    planner = _PathPlanner(paths, {".".join(map(str, path)): held for path, held in (blocks or {}).items()})
    try:
        state_dict_saver.save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _together(error) from error


def load(
    entries: Mapping[str, Any], reader: NamingReader, alone: bool = False, blocks: Mapping[str, Blocks] | None = None
) -> dict[str, Any]:
    """Fill the tensors, or replace the objects, that this rank asks for by key; ranks may ask for different ones.

    Args:
        entries: What to load, and the tensors to load it to.
        reader: Reads the folder.
        alone: Only this process reads, and no other takes part.
        blocks: Of entries that are cut over tensor ranks, views of the blocks that this rank holds.

    Raises:
        CheckpointError: On all ranks, if one of them failed.
    """
    state = dict(entries)
    if not state and alone:
        return state
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
            state_dict_loader.load(
                state, storage_reader=reader, planner=_LoadPlanner(reader.weights_only, blocks or {}), no_dist=alone
            )
    except CheckpointException as error:
        raise _together(error) from error
    return state


class _LoadPlanner(DefaultLoadPlanner):
    """Unpickles objects as ``weights_only`` says; DCP's own planner would run any code in them."""

    def __init__(self, weights_only: bool, blocks: Mapping[str, Blocks]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only
        self._blocks = blocks

    def create_local_plan(self) -> LoadPlan:
        everything = self.state_dict
        self.state_dict = {key: value for key, value in everything.items() if key not in self._blocks}
        plan = super().create_local_plan()
        self.state_dict = everything
        assert self.metadata is not None
        for key, (_, held) in self._blocks.items():
            chunks = [_chunk(offsets, block) for offsets, block in held.items()]
            stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key])
            plan.items.extend(create_read_items_for_chunk_list(key, stored, chunks))
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        if index.fqn in self._blocks:
            return self._blocks[index.fqn][1][tuple(index.offset or ())]
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            if not self._weights_only:
                raise
            first_line = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{key} holds objects that weights_only=True does not allow; if you trust the checkpoint, pass "
                f"weights_only=False ({first_line})"
            ) from error


class _PathPlanner(DefaultSavePlanner):
    """Takes entries that are already flat, so that containers without tensors are saved unchanged."""

    def __init__(self, paths: Mapping[str, KeyPath], blocks: Mapping[str, Blocks]) -> None:
        super().__init__()
        self._paths = paths
        self._blocks = blocks

    def create_local_plan(self) -> SavePlan:
        everything = self.state_dict
        self.state_dict = {key: value for key, value in everything.items() if key not in self._blocks}
        plan = super().create_local_plan()
        self.state_dict = everything
        items = [
            WriteItem(
                MetadataIndex(key, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(offsets, block), TensorProperties.create_from_tensor(block), shape),
            )
            for key, (shape, held) in self._blocks.items()
            for offsets, block in held.items()
        ]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._blocks:
            return self._blocks[index.fqn][1][tuple(index.offset or ())]
        return super().lookup_object(index)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.mappings = dict(self._paths)
        self.is_coordinator = is_coordinator


def _chunk(offsets: Sequence[int], block: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), block.shape)


class TyingWriter(FileSystemWriter):
    """Enters the further names of tied parameters in the table, pointing at the bytes of the first name.

    So nothing is saved twice, and every reader finds every name, whether they are tied in its model or not.

    Args:
        path: The folder.
        tied: For each further path, the path whose bytes it shares.
        order: Paths in the order in which the table is to have them; others follow.
    """

    def __init__(self, path: Path, tied: Mapping[KeyPath, KeyPath], order: Sequence[KeyPath] = ()) -> None:
        super().__init__(path)
        self._tied = tied
        self._order = order

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        further: dict[str, list[str]] = {}
        for alias, first in self._tied.items():
            key, first_key = (".".join(map(str, path)) for path in (alias, first))
            further.setdefault(first_key, []).append(key)
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata[first_key]
            metadata.planner_data[key] = alias
        ordered = dict.fromkeys([*(".".join(map(str, path)) for path in self._order), *metadata.state_dict_metadata])
        metadata.state_dict_metadata = {key: metadata.state_dict_metadata[key] for key in ordered}
        shared = [
            dataclasses.replace(result, index=MetadataIndex(key, result.index.offset, result.index.index))
            for rank_results in results
            for result in rank_results
            for key in further.get(result.index.fqn, ())
        ]
        self.write_table(metadata, [*results, shared])

    def write_table(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the table of contents; on the first rank, when all have written."""
        super().finish(metadata, results)
        file = Path(self.path) / TABLE_FILENAME
        content = sealed(file.read_bytes())
        with file.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


class RemoteWriter(TyingWriter):
    """Writes shards to a URL under new names, so that shards of an earlier save remain.

    Attributes:
        table: On the first rank, after a save, the table of contents, which is not written yet.

    The arguments are those of :class:`TyingWriter`.
    """

    def __init__(self, path: UPath, tied: Mapping[KeyPath, KeyPath], order: Sequence[KeyPath] = ()) -> None:
        super().__init__(Path(), tied, order)
        self.fs = fsspec_files()()
        self.path = self.fs.init_path(str(path))
        self.sync_files = False
        self.table = Metadata({})
        self._folder = path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        prefixes: list[Any] = [plan.storage_data for plan in plans]
        named = [dataclasses.replace(each, prefix=f"{self.save_id}{each.prefix}") for each in prefixes]
        return [dataclasses.replace(plan, storage_data=each) for plan, each in zip(plans, named, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with naming(self._folder, "written"):
            return super().write_data(plan, planner)

    def write_table(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with TemporaryDirectory(prefix="lightning_pp_") as unused:
            FileSystemWriter(unused, sync_files=False).finish(metadata, results)  # completes it
        metadata.storage_meta = self.storage_meta()
        self.table = metadata


class NamingReader(FileSystemReader):
    """Raises :class:`CheckpointError` with the name of the file that cannot be read.

    Args:
        path: The folder; of one at a URL, what is needed of a file is read, piece by piece.
        weights_only: As in ``torch.load``: run no code that the folder contains.
    """

    def __init__(self, path: Location, weights_only: bool = True) -> None:
        super().__init__(Path() if is_remote(path) else path)
        self._pieces: Any = None
        if is_remote(path):
            self.fs = self._pieces = _Pieces(path.fs)
            self.path = path.path
        self.weights_only = weights_only
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._table.storage_meta = self._table.storage_meta or StorageMeta()
        self._table.storage_meta.load_id = self.load_id
        return self._table

    @cached_property
    def _table(self) -> Metadata:
        file = self._folder / TABLE_FILENAME
        try:
            with naming(file, "read"), file.open("rb") as content:
                table_bytes, is_sealed = unsealed(content.read())
            stream = io.BytesIO(table_bytes)
            table: Metadata = load_table(stream, self.weights_only)
            if not is_sealed and stream.read(1):
                raise ValueError(f"{len(table_bytes)} bytes do not end with the table or its checksum")
            if not isinstance(table, Metadata):
                raise TypeError(f"it holds a {type(table).__name__}")
        except CheckpointError as error:
            raise CheckpointError(f"{file} is not read: {error}") from error
        except Exception as error:
            raise _damaged(file, error) from error
        return table

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        together: dict[tuple[str, int, int], list[Any]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            piece = (stored.offset, stored.length) if self._pieces else (0, 0)
            together.setdefault((stored.relative_path, *piece), []).append(item)
        for (name, offset, length), items in together.items():
            file = self._folder / name
            if self._pieces is not None and is_remote(file):
                with naming(file, "read"):
                    self._pieces.fetch(file.path, offset, length)
            try:
                self._check(name, [item.storage_index for item in items])
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except CheckpointError:
                raise
            except Exception as error:
                raise _damaged(file, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check(self, table: Metadata, share: tuple[int, int] = (0, 1)) -> None:
        """Compares all that the table names with its checksums.

        Args:
            table: As :meth:`read_metadata` returned it.
            share: ``(index, number)`` of the processes that share the work; this one checks every ``number``-th entry.

        Raises:
            CheckpointError: A file cannot be read, or an entry is damaged; names the file and the entry.
        """
        self.storage_data = table.storage_data or {}
        places = {  # tied names share one
            (stored.relative_path, stored.offset, stored.length): index for index, stored in self.storage_data.items()
        }
        for name, offset, length in sorted(places)[share[0] :: share[1]]:
            file = self._folder / name
            if self._pieces is not None and is_remote(file):
                with naming(file, "read"):
                    self._pieces.fetch(file.path, offset, length)
            try:
                self._check(name, [places[name, offset, length]])
            except OSError as error:
                raise _damaged(file, error) from error

    def _check(self, name: str, entries: Iterable[MetadataIndex]) -> None:
        """Compares entries of one file with their checksums; those that were compressed by another tool have none."""
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            for entry in dict.fromkeys(entries):
                stored = self.storage_data[entry]
                if stored.transform_descriptors:
                    continue
                try:
                    check_archive(View(cast(IO[bytes], stream), stored.offset, stored.length))
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{self._folder / name} cannot be read, so use another checkpoint: {entry.fqn} is damaged "
                        f"(bytes {stored.offset} to {stored.offset + stored.length}), {error}"
                    ) from error


class _Piece(io.BytesIO):
    """Bytes of a file from an offset on, at the places that they have in the file."""

    def __init__(self, content: bytes, offset: int) -> None:
        super().__init__(content)
        self._offset = offset

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return super().seek(position - self._offset if whence == os.SEEK_SET else position, whence) + self._offset

    def tell(self) -> int:
        return super().tell() + self._offset


class _Pieces(fsspec_files()):  # type: ignore[misc]
    """Opens files of which one piece has been fetched: one request for a tensor, and no more of the file than that."""

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        super().__init__()
        self.fs = filesystem
        self._piece = _Piece(b"", 0)

    def fetch(self, file: str, offset: int, length: int) -> None:
        self._piece = _Piece(self.fs.cat_file(file, start=offset, end=offset + length), offset)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        yield self._piece


def _together(error: CheckpointException) -> CheckpointError:
    """Every rank's reason, each reason once."""
    reasons = {str(reason): rank for rank, (reason, _) in sorted(error.failures.items(), reverse=True)}
    return CheckpointError("\n".join(f"{reason} (on rank {rank})" for reason, rank in reasons.items()))


def _damaged(file: Any, error: Exception) -> CheckpointError:
    first_line = str(error).partition("\n")[0]
    return CheckpointError(f"{file} cannot be read, so use another checkpoint ({type(error).__name__}: {first_line})")
