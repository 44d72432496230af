"""Loading a checkpoint of either format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pp.checkpoint import folder
from lightning_pp.checkpoint.catalog import ParameterCatalog
from lightning_pp.checkpoint.full import load_full
from lightning_pp.checkpoint.ranks import Ranks, from_root
from lightning_pp.checkpoint.sharded import load_sharded


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
    """Load a folder with :func:`load_sharded`, a file with :func:`load_full`; the root looks which it is.

    Args and errors are theirs.

    Returns:
        The rest of the checkpoint, on every rank.
    """
    ranks = Ranks.from_mesh(mesh)
    is_folder = False
    if ranks.is_root:
        folder.recover(Path(path))
        is_folder = Path(path).is_dir()
    load = load_sharded if from_root(is_folder, ranks) else load_full
    return load(
        path,
        module=module,
        optimizers=optimizers,
        catalog=catalog,
        mesh=mesh,
        strict=strict,
        weights_only=weights_only,
    )
