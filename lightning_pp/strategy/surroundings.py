"""The surroundings of a pipeline and its options; all other parts of the strategy are made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.device_mesh import DeviceMesh

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.pipeline_options import PipelineOptions


@dataclass(frozen=True)
class Surroundings:
    """Where a pipeline runs, and its options.

    Attributes:
        module: The user's module.
        mesh: The whole mesh.
        data_parallel: Of it, the replicas at this rank's place, as one axis.
        sizes: Their sizes.
        device: Where this rank computes.
        precision: The precision plugin; its contexts are entered around the step of each microbatch.
        options: What the user says of the pipeline.
        timeout: How long a collective may wait.
        compile_options: Keyword arguments for ``torch.compile`` of each unit; None to leave units as they are.
        communicators_bytes: What the communicators of collectives have taken of a device. Those of channels between
            neighbours are opened, and added, where there is a limit of memory.
    """

    module: pl.LightningModule
    mesh: DeviceMesh
    data_parallel: DeviceMesh
    sizes: ParallelSizes
    device: torch.device
    precision: Precision
    options: PipelineOptions
    timeout: timedelta | None
    compile_options: Mapping[str, Any] | None = None
    communicators_bytes: int = 0

    @property
    def rank(self) -> int:
        """This rank's place in the pipeline."""
        return self.mesh.get_local_rank("pipeline")

    @property
    def replica(self) -> int:
        """Which replica it belongs to."""
        return self.data_parallel.get_local_rank()
