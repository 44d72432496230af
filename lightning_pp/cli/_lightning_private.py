"""The private names of Lightning that the commands use; nothing else in this layer uses any.

Tried with Lightning 2.6.4 to 2.6.6. Importing fails, and says which name is missing, where a version has one no longer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.fabric.utilities import throughput

from lightning_pp._private_names import private

# FLOP/s of GPUs, by name and dtype
FLOPS_OF_GPUS: Mapping[str, Mapping[torch.dtype | str, float]] = private(
    throughput, "_CUDA_FLOPS", of="lightning", tried="2.6.4 to 2.6.6"
)
