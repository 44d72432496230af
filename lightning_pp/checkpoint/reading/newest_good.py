"""The newest checkpoint that is not damaged: every byte of the candidates is compared with its checksum."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from upath import UPath

from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together_if_several, from_root
from lightning_pp.checkpoint.reading.torch_file import check_file, read_file
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.checksums import is_archive
from lightning_pp.checkpoint.storage.location import Location, is_file, is_folder, is_remote, locate, naming, on_disk
from lightning_pp.checkpoint.storage.remote_folder import trainer_state_file
from lightning_pp.checkpoint.storage.torch_storage import NamingReader
from lightning_pp.errors import CheckpointError

EXTENSION = ".ckpt"


@dataclass(frozen=True)
class NewestGood:
    """The newest checkpoint that can be read whole.

    Attributes:
        path: The folder or file.
        damaged: Newer ones, newest first, each with the reason why it cannot be read.
    """

    path: Location
    damaged: tuple[tuple[Location, str], ...]


def newest_good(
    where: str | os.PathLike[str] | UPath | Sequence[Location],
    *,
    weights_only: bool | None = None,
    ranks: Ranks | None = None,
) -> NewestGood:
    """Find the newest undamaged checkpoint. All of it is read, also what this rank would not load.

    Args:
        where: A path or URL of a folder, which is searched at any depth (:func:`checkpoints_in`); or candidates,
            newest first.
        weights_only: As in ``torch.load``; None is True.
        ranks: If given, all ranks call this, each reads its share, and the root's ``where`` is used. If None, this
            process works alone.

    Raises:
        CheckpointError: On all ranks: there is no candidate, or all are damaged. The text names them all.
    """
    with fail_together_if_several(ranks):
        found: list[str] = []
        if ranks is None or ranks.is_root:
            given = where if isinstance(where, Sequence) and not isinstance(where, str) else checkpoints_in(where)
            found = [str(path) for path in given]
            if not found:
                raise CheckpointError(f"there is no checkpoint in {where}; give a folder with checkpoints in it")
    found = found if ranks is None else from_root(found, ranks)
    share = (0, 1) if ranks is None else ranks.share
    damaged: list[tuple[Location, str]] = []
    for path in found:
        location = locate(path)
        try:
            with fail_together_if_several(ranks):
                verify(location, weights_only=weights_only, share=share)
        except CheckpointError as error:
            damaged.append((location, str(error)))
        else:
            return NewestGood(location, tuple(damaged))
    reasons = "\n".join(f"- {reason}" for _, reason in damaged)
    raise CheckpointError(
        f"None of {len(damaged)} checkpoints can be read, so there is none to resume from:\n{reasons}"
    )


def checkpoints_in(*where: str | os.PathLike[str] | UPath) -> list[Location]:
    """The checkpoints in folders and the folders in them, newest first: complete folders, and files named ``*.ckpt``.

    A folder is as old as its table of contents, which is written last. A link and what it points to are one.

    Raises:
        CheckpointError: A remote storage does not answer.
    """
    times: dict[str, float] = {}
    for location in map(locate, where):
        times |= _times_remote(location) if is_remote(location) else _times_local(str(location))
    tables = {
        path.rpartition("/")[0]: time for path, time in times.items() if path.endswith("/" + folder.TABLE_FILENAME)
    }
    files = {path: time for path, time in times.items() if path.endswith(EXTENSION)}
    newest_first = sorted([*tables.items(), *files.items()], key=lambda item: (item[1], item[0]), reverse=True)
    return [locate(path) for path, _ in newest_first]


def verify(path: Location, *, weights_only: bool | None = None, share: tuple[int, int] = (0, 1)) -> None:
    """Read a checkpoint of either format and compare it with its checksums. Nothing of it is executed or kept.

    Args:
        path: The folder or file.
        weights_only: As in ``torch.load``; None is True.
        share: ``(index, number)`` of the processes that share the work.

    Raises:
        CheckpointError: It is missing, incomplete or damaged; names the file.
    """
    if not is_folder(path):
        if not is_file(path):
            raise CheckpointError(f"{path} does not exist; give the path of a checkpoint")
        with on_disk(path) as here:
            with here.open("rb") as stream:
                has_checksums = is_archive(stream)
            if has_checksums:
                check_file(path, here, share)
            else:
                read_file(path, weights_only)
        return
    folder.check_finished(path)
    reader = NamingReader(path, weights_only is not False)
    table = reader.read_metadata()
    folder.check_complete(path, table)
    state_file = trainer_state_file(path, table)
    with on_disk(state_file) as here:
        check_file(state_file, here)
    reader.check(table, share)


def _times_local(where: str) -> dict[str, float]:
    """The files below a folder by their real paths, with the times of their last change."""
    times: dict[str, float] = {}
    for inside, folders, names in os.walk(where):
        folders[:] = [name for name in folders if not name.startswith(".")]  # saves that were interrupted
        for name in names:
            path = os.path.realpath(os.path.join(inside, name))
            if os.path.isfile(path):
                times[path.replace(os.sep, "/")] = os.stat(path).st_mtime_ns / 1e9
    return times


def _times_remote(where: UPath) -> dict[str, float]:
    with naming(where, "listed"):
        where.fs.invalidate_cache()
        if not where.fs.isdir(where.path):
            return {}
        paths: list[str] = where.fs.find(where.path)
        wanted = [path for path in paths if path.endswith((folder.TABLE_FILENAME, EXTENSION))]
        return {where.fs.unstrip_protocol(path): where.fs.modified(path).timestamp() for path in wanted}
