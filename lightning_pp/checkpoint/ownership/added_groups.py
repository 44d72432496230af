"""Parameter groups that user code adds to an optimizer during training; each stage adds its own parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.errors import CheckpointError


def with_added_groups(part: RankPart) -> RankPart:
    """``part`` with a catalogue that knows all groups of its optimizers. Collective over all ranks.

    An added group has the parameters that all ranks have in theirs, in the order of the module.

    Raises:
        CheckpointError: On all ranks: they have different numbers of groups.
    """
    names = {id(parameter): name for name, parameter in part.parameters().items()}
    own = [
        [[names[id(each)] for each in group["params"] if id(each) in names] for group in optimizer.param_groups]
        for optimizer in part.optimizers
    ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    groups = []
    for index, known in enumerate(part.catalog.optimizer_groups):
        numbers = [len(groups_of[index]) for groups_of in everywhere]
        if len(set(numbers)) > 1:
            raise CheckpointError(
                f"The ranks have {', '.join(map(str, numbers))} parameter groups in "
                f"{type(part.optimizers[index]).__name__}: add_param_group was called on some of them only. Call it on "
                "every rank. Where the stage has none of the parameters, the group is empty."
            )
        added = []
        for number in range(len(known), numbers[0]):
            held = {name for groups_of in everywhere for name in groups_of[index][number]}
            added.append(tuple(name for name in part.catalog.canonical_names if name in held))
        groups.append((*known, *added))
    return replace(part, catalog=replace(part.catalog, optimizer_groups=tuple(groups)))
