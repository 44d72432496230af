"""Sharding inside stages: what data-parallel ranks and stages share, and how its gradients come together.

This layer knows torch.distributed; when things happen is the runtime's to say.

* :mod:`.fsdp` shards the units of a rank by FSDP2 and reduces each once per step;
* :mod:`.replicated_units` keeps them whole and reduces each once per step;
* :mod:`.stages` gathers, frees and reduces whole stages, as programs command it;
* :mod:`.gradients` has what happens to gradients after a backward: hooks of parameters, averages over data-parallel
  ranks, sums over the stages that hold a parameter, norms and clipping;
* :mod:`.shard_updates` has optimizers update shards as plain tensors, :mod:`.whole_updates` others whole matrices.
"""

from __future__ import annotations

from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.gradients.clip import clip_by_norm_, clip_by_value_, global_norm
from lightning_pp.sharding.gradients.replicated import ReplicatedGradients, broadcast_parameters, broadcast_values
from lightning_pp.sharding.gradients.shared import SharedParameters
from lightning_pp.sharding.replicated_units import ReplicatedUnits
from lightning_pp.sharding.shard_updates import end_update, forget_shards, update_shards
from lightning_pp.sharding.stage_updates import end_stage_update, update_as_stage
from lightning_pp.sharding.stages import ShardedStages
from lightning_pp.sharding.units.collective_times import CollectiveClock, CollectiveSums, CollectiveTimes
from lightning_pp.sharding.units.grouping import never_sharded

__all__ = [
    "CollectiveClock",
    "CollectiveSums",
    "CollectiveTimes",
    "ReplicatedGradients",
    "ReplicatedUnits",
    "ShardedStages",
    "ShardedUnits",
    "SharedParameters",
    "broadcast_parameters",
    "broadcast_values",
    "clip_by_norm_",
    "clip_by_value_",
    "end_stage_update",
    "end_update",
    "forget_shards",
    "global_norm",
    "never_sharded",
    "update_as_stage",
    "update_shards",
]
