"""Opening a checkpoint of either format."""

from __future__ import annotations

import os

from torch.distributed.device_mesh import DeviceMesh

from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_file import FileCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.storage import folder
from lightning_pp.checkpoint.storage.location import is_folder


def open_checkpoint(
    path: str | os.PathLike[str], mesh: DeviceMesh, *, weights_only: bool | None = None
) -> OpenedCheckpoint:
    """Open a folder or a file; the root looks which it is. Collective over all ranks.

    Args:
        path: The checkpoint; the root's path counts.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks.
        weights_only: As in ``torch.load``; None is True: nothing that the checkpoint contains is executed.

    Raises:
        CheckpointError: On all ranks: there is no such checkpoint, it is incomplete or damaged, or it holds objects
            that ``weights_only`` forbids.
    """
    ranks = Ranks.from_mesh(mesh)
    with fail_together():
        is_sharded = False
        if ranks.is_root:
            location = folder.checkpoint_at(path)
            folder.recover(location)
            is_sharded = is_folder(location)
    path, is_sharded = from_root((str(path), is_sharded), ranks)
    with fail_together():
        opened: OpenedCheckpoint
        location = folder.checkpoint_at(path)
        if is_sharded:
            opened = FolderCheckpoint.open(location, weights_only, check_files=ranks.is_root)
        else:
            opened = FileCheckpoint.open(location, weights_only, ranks.share)
    return opened
