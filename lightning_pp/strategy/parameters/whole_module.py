"""A module that was split, whole again on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pp.checkpoint.ownership.rank_part import RankPart, set_extra_state, to_save
from lightning_pp.checkpoint.ownership.ranks import Ranks, gather_entries
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.split._torch_private import buffers_of
from lightning_pp.strategy.parameters.gradients import StageGradients


@torch.no_grad()
def make_whole(part: RankPart, split: SplitModel, gradients: StageGradients) -> None:
    """Gives the module all parameters, buffers and extra states, on the CPU, as an ordinary module. Collective.

    Takes the memory of the whole model on every rank, and that of its largest tensor once more.
    """
    ranks = Ranks.from_mesh(part.mesh)
    mine = to_save(part.destinations(), part.catalog, ranks.pipeline_rank)
    values = gather_entries(mine, ranks, part.cuts, on_all=True)
    gradients.take_apart()
    module = split.module
    parameters = {split.fake_parameters.canonical_names[name] for name in split.fake_parameters.names}
    split.fake_parameters.restore({name: value for name, value in values.items() if name in parameters})
    for name, value in values.items():
        if name in parameters:
            continue
        prefix, _, attribute = name.rpartition(".")
        if not isinstance(value, Tensor):
            set_extra_state(module, name, value)
            continue
        buffers = buffers_of(module.get_submodule(prefix))
        held = buffers.get(attribute)
        if held is not None and held.shape == value.shape:
            held.copy_(value)
        else:
            buffers[attribute] = value
    module.to("cpu")
