"""Several ranks on one device. NCCL accepts one rank of a host there, so each rank claims to be a host."""

from __future__ import annotations

import os
import socket

import torch

_SHARE_OF_TENSORS = 0.7
"""The part of the device's memory that all ranks have for tensors. CUDA and NCCL take theirs from the rest."""


def variables_of_rank(rank: int, num_ranks: int) -> dict[str, str]:
    """Environment of a rank that shares its device. What the environment already says of networks stays.

    NCCL knows hosts by ``NCCL_HOSTID``. It sends between hosts over the network, here over the loopback interface.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    defaults = {
        **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1"),
        **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), loopback),
        "NCCL_NET": "Socket",
        "NCCL_MNNVL_ENABLE": "0",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
    }
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "NCCL_HOSTID": f"rank-{rank}",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def limit_memory(device: torch.device, num_ranks: int) -> None:
    """Gives this process its part of a device that ``num_ranks`` share."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(_SHARE_OF_TENSORS / num_ranks, device)
