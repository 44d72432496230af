"""Opening a checkpoint of either format, and loading it in one step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.opened_file import FileCheckpoint
from lightning_pp.checkpoint.reading.opened_folder import FolderCheckpoint
from lightning_pp.checkpoint.storage import folder


def open_checkpoint(
    path: str | os.PathLike[str], *, mesh: DeviceMesh, weights_only: bool | None = None
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
        is_folder = False
        if ranks.is_root:
            folder.recover(Path(path))
            is_folder = Path(path).is_dir()
    path, is_folder = from_root((os.fspath(path), is_folder), ranks)
    with fail_together():
        opened: OpenedCheckpoint
        if is_folder:
            opened = FolderCheckpoint.open(Path(path), weights_only, check_files=ranks.is_root)
        else:
            opened = FileCheckpoint.open(Path(path), weights_only)
    return opened


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    module: Module,
    optimizers: Sequence[Optimizer],
    catalog: ParameterCatalog,
    mesh: DeviceMesh,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a folder or a file, of whatever layout, into this one. Collective over all ranks.

    Args:
        path: As in :func:`open_checkpoint`, as are ``mesh`` and ``weights_only``.
        module: As in :meth:`~lightning_pp.checkpoint.reading.opened.OpenedCheckpoint.load`, as are the other arguments.
        optimizers: As there.
        catalog: As there.
        mesh: Axes ``pipeline`` and then those of data parallelism, over all ranks.
        strict: Whether names that are missing in the checkpoint or in the model are errors.
        weights_only: As in ``torch.load``.

    Returns:
        The rest of the checkpoint, on every rank.

    Raises:
        CheckpointError: On all ranks: as in those two.
    """
    opened = open_checkpoint(path, mesh=mesh, weights_only=weights_only)
    opened.load(module=module, optimizers=optimizers, catalog=catalog, strict=strict)
    return {key: value for key, value in opened.content.items() if key not in ("state_dict", "optimizer_states")}
