"""The hardware queues of a CUDA device, on which a receive that waits may hold up what is behind it."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.utilities import rank_zero_warn

_NAME, _MOST = "CUDA_DEVICE_MAX_CONNECTIONS", 32


def use_all_queues(device: torch.device) -> None:
    """Sets ``CUDA_DEVICE_MAX_CONNECTIONS`` to 32, the most there are, or tells why it cannot; before CUDA starts.

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
            f"so a receive that waits may hold up other work. Start the job with {_NAME}={_MOST}."
        )
    elif given.strip() != str(_MOST):
        rank_zero_warn(
            f"{_NAME}={given} is set. Streams share that many queues, so a receive that waits may hold up other work, "
            f"and for ever if its message depends on that work. Unset it, or set it to {_MOST}."
        )
