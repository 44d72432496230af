"""Waits on a CUDA device: of work behind a receive in a hardware queue, and of the host for queued work."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_pp.split.data.tree import tensors_of

_NAME, _MOST = "CUDA_DEVICE_MAX_CONNECTIONS", 32


def use_all_queues(device: torch.device) -> None:
    """Sets ``CUDA_DEVICE_MAX_CONNECTIONS`` to its maximum of 32, before CUDA starts, or warns why it cannot.

    By default a device has 8 queues, and streams share them. Work behind a posted receive in one queue waits for its
    message, be it of another stream (https://github.com/NVIDIA/nccl/issues/783).
    """
    if device.type != "cuda":
        return
    given = os.environ.get(_NAME)
    if given is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ[_NAME] = str(_MOST)
    elif given is None:
        rank_zero_warn(
            f"CUDA was used before the run, so {_NAME} cannot be set any more. Streams of the device share 8 queues, "
            f"so a waiting receive may block other work. Start the job with {_NAME}={_MOST}."
        )
    elif given.strip() != str(_MOST):
        rank_zero_warn(
            f"{_NAME}={given} is set. Streams share that many queues, so a waiting receive may block other work, for "
            f"ever if its message depends on that work. Unset it, or set it to {_MOST}."
        )


def advise_pinned_memory(batch: Any, device: torch.device) -> None:
    """Warns if ``batch``, as its loader yields it, is not in pinned memory."""
    if device.type == "cuda" and any(not (tensor.is_cuda or tensor.is_pinned()) for tensor in tensors_of(batch)):
        rank_zero_warn(
            "Batches are not in pinned memory. Copying one to the device may wait for all work queued there, and the "
            "device then waits for the host. Set pin_memory=True on the DataLoader."
        )
