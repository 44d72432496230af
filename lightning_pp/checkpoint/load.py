"""Loading a checkpoint of either format in one step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pp.checkpoint.catalog import ParameterCatalog
from lightning_pp.checkpoint.opened import open_checkpoint


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
        path: As in :func:`~lightning_pp.checkpoint.opened.open_checkpoint`, as are ``mesh`` and ``weights_only``.
        module: As in :meth:`~lightning_pp.checkpoint.opened.OpenedCheckpoint.load`, as are the other arguments.
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
