"""A checkpoint between two steps: opened and checked by itself, then loaded into a model.

In between, hooks may edit what was opened: rename, drop, cut or add. A file is a
:class:`~.open.FileCheckpoint`, a folder a :class:`~.opened_folder.FolderCheckpoint`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from lightning_pp.checkpoint.content import MODEL
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.cuts import blocks_of
from lightning_pp.checkpoint.ownership.rank_part import RankPart, copy_into_shard, set_extra_state, write_optimizer
from lightning_pp.checkpoint.ownership.ranks import fail_together
from lightning_pp.checkpoint.reading.checks import check_model
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor, in_memory
from lightning_pp.checkpoint.storage import torch_storage as storage
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.checkpoint.storage.torch_storage import NamingReader
from lightning_pp.errors import CheckpointError


class OpenedCheckpoint(ABC):
    """A checkpoint with known content, of which no tensor has been read.

    Attributes:
        path: The file or folder.
        content: All of it but the optimizers of a sharded one; ``state_dict`` has tensors that are read where they are
            used: mapped into memory (a file), or :class:`StoredTensor` (a folder).
    """

    def __init__(self, path: Location, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def load(self, part: RankPart, content: Mapping[str, Any] | None = None, *, strict: bool = True) -> None:
        """Load the model, and the optimizers if there are any. Collective over all ranks.

        Nothing is changed before all checks have passed on all ranks. A rank reads what it owns.

        Args:
            part: What this rank holds. Parameters, all buffers and extra states are overwritten in place; the state and
                hyper-parameters of optimizers are replaced.
            content: What hooks have made of :attr:`content`.
            strict: Whether names that are missing in the checkpoint or in the model are errors.

        Raises:
            CheckpointError: On all ranks: the checkpoint is damaged, or does not fit the model.
        """
        content = self.content if content is None else content
        catalog, num_optimizers = part.catalog, len(part.optimizers)
        with fail_together():
            saved = content.get(MODEL)
            if not isinstance(saved, Mapping):
                raise CheckpointError(
                    f"on_load_checkpoint removed 'state_dict' from the checkpoint {self.path}. Keep it there"
                )
            check_model(self.path, saved, catalog, part.destinations().keys(), strict)
        groups = self.checked_groups(num_optimizers, catalog, content) if num_optimizers else []
        load_state(saved, part, self.reader)
        if not num_optimizers:
            return
        with fail_together():
            parameters = part.parameters()
        states = self.own_states(part, parameters, content)
        with fail_together():
            for optimizer, state, its_groups in zip(part.optimizers, states, groups, strict=True):
                write_optimizer(optimizer, parameters, state, its_groups)

    @property
    def reader(self) -> NamingReader | None:
        """What reads the stored tensors in ``content``."""
        return None

    @abstractmethod
    def checked_groups(
        self, number: int, catalog: ParameterCatalog, content: Mapping[str, Any]
    ) -> list[list[dict[str, Any]]]:
        """The parameter groups of each of the ``number`` optimizers. Collective over all ranks.

        Raises:
            CheckpointError: On all ranks: there are more or fewer optimizers, or their groups are others.
        """

    @abstractmethod
    def own_states(
        self, part: RankPart, parameters: Mapping[str, Parameter], content: Mapping[str, Any]
    ) -> Iterable[dict[str, Any]]:
        """What each of the optimizers of ``part`` keeps of its ``parameters``, by name. Collective."""


def load_state(saved: Mapping[str, Any], part: RankPart, reader: NamingReader | None) -> None:
    """Put whole named values into this rank's part of the module. Collective over all ranks.

    Args:
        saved: Tensors and extra states by name; names that this rank does not own are not looked at.
        part: What this rank holds; optimizers are left alone.
        reader: Reads the stored tensors among them, of which a shard is read for a shard.

    Raises:
        CheckpointError: On all ranks: something could not be read or copied.
    """
    catalog = part.catalog
    with fail_together():
        # A tied parameter may be there under each of its names: the last counts, as in Module.load_state_dict.
        by_owner = {catalog.canonical_name(name): value for name, value in saved.items()}
        to_read: dict[str, Any] = {}
        blocks: dict[str, storage.Blocks] = {}
        for name, destination in part.destinations().items():
            if name not in by_owner:
                continue
            value = by_owner[name]
            if not isinstance(destination, torch.Tensor) or name not in catalog.shapes:
                set_extra_state(part.module, name, value)
            elif reader is not None and isinstance(value, StoredTensor) and value.key not in to_read:
                to_read[value.key] = destination
                if (cut := part.cuts.of(name, destination)) is not None:
                    blocks[value.key] = cut.shape, blocks_of(destination, cut)
            else:
                copy_into_shard(in_memory(value), destination, part.cuts.of(name, destination))
    if reader is not None:
        storage.load(to_read, reader, blocks=blocks)
