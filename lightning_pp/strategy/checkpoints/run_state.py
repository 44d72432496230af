"""What a checkpoint keeps of a run beside Lightning's own: random numbers, and the loaders of each replica."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_pp.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_pp.strategy.engine import PipelineEngine


RUN_STATE = "lightning_pp"
_log = logging.getLogger(__name__)


def own_run_state(checkpoint: Mapping[str, Any], engine: PipelineEngine) -> dict[str, Any]:
    """What to add to a checkpoint; every rank calls it.

    Lightning keeps the loaders' state of rank 0. Where those of the replicas differ, all are kept.

    Raises:
        CheckpointError: On all ranks: a weight is not finite, and the strategy is to look at that.
    """
    loaders = _loader_states(checkpoint)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (engine.rank, engine.replica, pickle.dumps(loaders), engine.finite.bad_weight()))
    if bad := [weight for _, _, _, weight in gathered if weight is not None]:
        raise CheckpointError(
            f"{bad[0]} Nothing is saved, so that no good checkpoint is replaced by it: go on from the last one. "
            "on_nonfinite='ignore' saves such weights, too."
        )
    of_replica = {replica: state for rank, replica, state, _ in gathered if rank == 0}
    own: dict[str, Any] = {"random": engine.random_state()}
    if len(set(of_replica.values())) > 1:
        own["loaders"] = [pickle.loads(of_replica[replica]) for replica in sorted(of_replica)]
    return {RUN_STATE: own}


def restore_run_state(checkpoint: Mapping[str, Any], engine: PipelineEngine) -> None:
    """Continues the random numbers, and gives the trainer the loaders' state of this replica."""
    own = checkpoint.get(RUN_STATE)
    if not isinstance(own, Mapping):
        return
    engine.load_random_state(own["random"])
    loaders = own.get("loaders")
    if loaders is None:
        return
    if len(loaders) == engine.sizes.data_parallel:
        _loader_states(checkpoint)[:] = loaders[engine.replica]
    else:
        _log.warning(
            f"The loaders of the {len(loaders)} replicas that saved this checkpoint stood at different places, and now "
            f"there are {engine.sizes.data_parallel}: all start from where the first stood."
        )


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """The states of the training loaders, as Lightning keeps them."""
    fit_loop: Mapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    states: list[Any] = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states
