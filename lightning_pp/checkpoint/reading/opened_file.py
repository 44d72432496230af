"""A single-file checkpoint of any Trainer, opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn import Parameter

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.content import CURRENT_MODEL, MODEL, OPTIMIZERS
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart, shard_like
from lightning_pp.checkpoint.ownership.ranks import fail_together
from lightning_pp.checkpoint.reading.checks import check_group_sizes, check_num_optimizers
from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
from lightning_pp.checkpoint.reading.torch_file import read_file
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.errors import CheckpointError


class FileCheckpoint(OpenedCheckpoint):
    """A single file of any Trainer, mapped into memory; of one at a URL, a download."""

    @classmethod
    def open(cls, path: Location, weights_only: bool | None, share: tuple[int, int] = (0, 1)) -> FileCheckpoint:
        """Map a file; every rank does, and compares its share of the tensors with their checksums.

        Raises:
            CheckpointError: The file is missing, damaged or no checkpoint.
        """
        checkpoint = read_file(path, weights_only, mmap=True, share=share)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(MODEL), Mapping):
            raise CheckpointError(
                f"{path} has no 'state_dict', so it is not a checkpoint of a Trainer; use another file"
            )
        mapped = (MODEL, OPTIMIZERS, CURRENT_MODEL)
        trainer_state = {key: value for key, value in checkpoint.items() if key not in mapped}
        trainer_state = tree_map_only(torch.Tensor, torch.clone, trainer_state)  # does not hold on to the file
        return cls(path, {**checkpoint, **trainer_state})

    def checked_groups(
        self, number: int, catalog: ParameterCatalog, content: Mapping[str, Any]
    ) -> list[list[dict[str, Any]]]:
        with fail_together():
            saved = content.get(OPTIMIZERS, [])
            check_num_optimizers(self.path, len(saved), number)
            for index, (state, groups) in enumerate(zip(saved, catalog.optimizer_groups, strict=True)):
                check_group_sizes(self.path, index, [len(group["params"]) for group in state["param_groups"]], groups)
        return [state["param_groups"] for state in saved]

    def own_states(
        self, part: RankPart, parameters: Mapping[str, Parameter], content: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        for state, groups in zip(content[OPTIMIZERS], part.catalog.optimizer_groups, strict=True):
            numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
            names = dict(zip(numbers, chain.from_iterable(groups), strict=True))
            yield {
                names[number]: shard_like(kept, parameters[names[number]], part.cuts.parts.get(names[number]))
                for number, kept in state["state"].items()
                if names[number] in parameters
            }
