"""A checkpoint between two steps: opened and checked by itself, then loaded into a model.

In between, hooks may edit what was opened: rename, drop, cut or add. A file is :mod:`.opened_file`, a folder
:mod:`.opened_folder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.local import (
    copy_whole,
    local_parameters,
    local_state_dict,
    set_extra_state,
    write_optimizer,
)
from lightning_pp.checkpoint.ownership.ranks import fail_together
from lightning_pp.checkpoint.reading.fit import check_model
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.storage import planner as storage
from lightning_pp.checkpoint.storage.planner import NamingReader
from lightning_pp.checkpoint.writing.sharded import MODEL
from lightning_pp.errors import CheckpointError


class OpenedCheckpoint(ABC):
    """A checkpoint of which the content is known and no tensor has been read.

    Attributes:
        path: The file or folder.
        content: All of it but the optimizers of a sharded one; ``state_dict`` has tensors that are read where they are
            used: mapped into memory (a file), or :class:`StoredTensor` (a folder).
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def load(
        self,
        *,
        module: Module,
        optimizers: Sequence[Optimizer],
        catalog: ParameterCatalog,
        content: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        """Load the model, and the optimizers if there are any. Collective over all ranks.

        Nothing is changed before all checks have passed on all ranks. A rank reads what it owns.

        Args:
            module: This rank's part; its parameters, all buffers and extra states are overwritten in place.
            optimizers: Their state and hyper-parameters are replaced; empty to load the module only.
            catalog: The unsplit module.
            content: What hooks have made of :attr:`content`.
            strict: Whether names that are missing in the checkpoint or in the model are errors.

        Raises:
            CheckpointError: On all ranks: the checkpoint is damaged, or does not fit the model.
        """
        content = self.content if content is None else content
        with fail_together():
            saved = content.get(MODEL)
            if not isinstance(saved, Mapping):
                raise CheckpointError(f"{self.path} has no 'state_dict' left after on_load_checkpoint; keep it")
            check_model(self.path, {name: _shape(value) for name, value in saved.items()}, catalog, strict)
        groups = self.checked_groups(len(optimizers), catalog, content) if optimizers else []
        load_state(saved, module, catalog, self.reader)
        if not optimizers:
            return
        with fail_together():
            parameters = local_parameters(module, catalog)
        states = self.own_states(len(optimizers), parameters, catalog, content)
        with fail_together():
            for optimizer, state, its_groups in zip(optimizers, states, groups, strict=True):
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
        self, number: int, parameters: Mapping[str, Parameter], catalog: ParameterCatalog, content: Mapping[str, Any]
    ) -> Iterable[dict[str, Any]]:
        """What each of the ``number`` optimizers keeps of this rank's ``parameters``, by name. Collective."""


def load_state(
    saved: Mapping[str, Any], module: Module, catalog: ParameterCatalog, reader: NamingReader | None
) -> None:
    """Put whole named values into this rank's part of the module. Collective over all ranks.

    Args:
        saved: Tensors and extra states by name; names that this rank does not own are not looked at.
        module: This rank's part.
        catalog: The unsplit module.
        reader: Reads the stored tensors among them, of which a shard is read for a shard.

    Raises:
        CheckpointError: On all ranks: something could not be read or copied.
    """
    with fail_together():
        # A tied parameter may be there under each of its names: the last counts, as in Module.load_state_dict.
        by_owner = {catalog.canonical_name(name): value for name, value in saved.items()}
        to_read: dict[str, Any] = {}
        for name, destination in local_state_dict(module, catalog).items():
            if name not in by_owner:
                continue
            value = by_owner[name]
            if not isinstance(destination, torch.Tensor) or name not in catalog.shapes:
                set_extra_state(module, name, value)
            elif reader is not None and isinstance(value, StoredTensor) and value.key not in to_read:
                to_read[value.key] = destination
            else:
                copy_whole(value.read() if isinstance(value, StoredTensor) else value, destination)
    if reader is not None:
        storage.load(to_read, reader)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
