"""This rank's part of the split module, as checkpoints need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.cuts import Cuts
from lightning_pp.checkpoint.ownership.rank_part import RankPart, set_extra_state, to_save
from lightning_pp.checkpoint.ownership.ranks import Ranks, gather_entries
from lightning_pp.distributed.meshes import tensor_mesh
from lightning_pp.errors import ConfigurationError, enumerate_names
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.split._torch_private import buffers_of
from lightning_pp.strategy.parameters.gradients import StageGradients


def rank_part(split: SplitModel, mesh: DeviceMesh, optimizers: Sequence[Optimizer]) -> RankPart:
    """To be called while all names are parameters and optimizers hold all of them.

    Args:
        split: The split model.
        mesh: The axis ``pipeline`` and then the others.
        optimizers: This rank's, which keep only its own parameters afterwards.
    """
    _refuse_other_names(split.module)
    catalog = ParameterCatalog.from_module(split.module, split.ranks_of).with_optimizers(split.module, optimizers)
    axis, parts = tensor_mesh(mesh), split.tensor_parts
    catalog = replace(catalog, shapes={**catalog.shapes, **{name: part.shape for name, part in parts.items()}})
    cuts = Cuts(parts, None if axis is None else axis.get_group())
    return RankPart(split.module, catalog, mesh, list(optimizers), cuts)


def _refuse_other_names(module: nn.Module) -> None:
    """Raises :class:`ConfigurationError` for a ``state_dict`` of user code that leaves out names, or adds any."""
    if type(module).state_dict is nn.Module.state_dict:
        return
    given, own = set(module.state_dict()), set(nn.Module.state_dict(module))
    if given != own:
        raise ConfigurationError(
            f"state_dict of {type(module).__name__} leaves out {enumerate_names(sorted(own - given)) or 'nothing'} and "
            f"adds {enumerate_names(sorted(given - own)) or 'nothing'}. A pipeline saves the module in parts, by the "
            "names of its parameters and buffers. To leave names out, set save_distributed_checkpoint=False and remove "
            "them in on_save_checkpoint. Put additions beside checkpoint['state_dict']."
        )


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
