"""States of callbacks that differ between stages, such as averages of a rank's own weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pp.errors import CheckpointError
from lightning_pp.split.data.tree import entries_of, map_leaves

Fingerprints = Mapping[str, str]
"""By the key of a callback: what its state has of tensors."""


def fingerprints_of(states: Mapping[str, Any]) -> Fingerprints:
    """Fingerprints that show whether callbacks' states have the same tensors on all ranks; numbers may differ."""
    return {key: _digest(state) for key, state in states.items()}


def _digest(state: Any) -> str:
    digest = hashlib.sha256()
    for place, leaf in entries_of(state, ""):
        if isinstance(leaf, Tensor):
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            digest.update(f"{place} {tuple(local.shape)} {local.dtype};".encode())
            if local.device.type != "meta":
                values = local.detach().cpu().contiguous()
                digest.update(values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return digest.hexdigest()


def states_of_ranks(states: Mapping[str, Any], of_ranks: Sequence[Fingerprints], module: nn.Module) -> dict[str, Any]:
    """What to keep of the callbacks whose states have other tensors on other ranks; every rank calls it.

    Args:
        states: Those of this rank, by the key of the callback.
        of_ranks: What :func:`fingerprints_of` gave on each rank.
        module: The user's module.
    """
    keys = sorted(key for key in of_ranks[0] if len({one.get(key) for one in of_ranks}) > 1)
    if not keys:
        return {}
    gathered: list[Any] = [None] * len(of_ranks)
    own = {key: map_leaves(_on_host, states.get(key)) for key in keys}
    dist.all_gather_object(gathered, (_held(module), own))
    return {
        "held": [held for held, _ in gathered],
        "states": {key: [state[key] for _, state in gathered] for key in keys},
    }


def give_back(kept: Mapping[str, Any], states: dict[str, Any], module: nn.Module) -> None:
    """Puts into ``states`` what this rank's callbacks had.

    Raises:
        CheckpointError: The ranks held other parts of the model then.
    """
    rank = dist.get_rank()
    held = kept["held"]
    if len(held) != dist.get_world_size() or held[rank] != _held(module):
        names = ", ".join(repr(key) for key in kept["states"])
        raise CheckpointError(
            f"The state of the callback {names} has tensors that differ from stage to stage. {len(held)} ranks saved "
            f"the checkpoint, with other parts of the model than the {dist.get_world_size()} ranks of this run have. "
            "Resume with the same stages (pipeline_parallel_size, schedule, split_points) and replicas, or without "
            "this callback. Lightning's WeightAveraging keeps averages of weights under any layout."
        )
    for key, of_ranks in kept["states"].items():
        states[key] = of_ranks[rank]


def _held(module: nn.Module) -> str:
    """What this rank has of the module, in short."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(f"{name} {tuple(local.shape)};".encode())
    return digest.hexdigest()


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) else leaf
