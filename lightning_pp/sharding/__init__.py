"""Sharding inside stages: parameters that data-parallel ranks and stages share, and the sums of their gradients.

This layer knows torch.distributed; when things happen is the runtime's to say.

* :mod:`.fsdp` shards the units of a rank by FSDP2 and reduces each once per step;
* :mod:`.replicated_units` keeps them whole and reduces each once per step;
* :mod:`.stages` gathers, frees and reduces whole stages, as programs command it;
* :mod:`.gradients` has what happens to gradients after a backward: hooks of parameters, averages over data-parallel
  ranks, sums over the stages that hold a parameter, norms and clipping;
* :mod:`.shard_updates` has optimizers update shards as plain tensors, :mod:`.whole_updates` others whole matrices.
"""
