"""The private names of Lightning that the commands use; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_pp._private_names import private

# FLOP/s of GPUs, by name and dtype
FLOPS_OF_GPUS: Mapping[str, Mapping[torch.dtype | str, float]] = private(
    "lightning.fabric.utilities.throughput._CUDA_FLOPS"
)
