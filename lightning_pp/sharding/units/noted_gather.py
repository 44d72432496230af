"""FSDP2's all-gather, with a handle that shows when it has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.sharding._torch_private import all_gather


class NotedAllGather:
    """For ``FSDPModule.set_custom_all_gather``: gathers as FSDP2 does by itself, and keeps the work handle."""

    def __init__(self) -> None:
        self._work: dist.Work | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor`` of all ranks into ``output_tensor``."""
        self._work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._work

    def take_work(self) -> dist.Work | None:
        """That of the latest gather, once; None if it has ended already or there was none."""
        work, self._work = self._work, None
        return work
