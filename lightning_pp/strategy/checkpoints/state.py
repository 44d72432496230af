"""What a checkpoint holds of a split module and its optimizers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pp.checkpoint import (
    OpenedCheckpoint,
    ParameterCatalog,
    ShardedSave,
    gather_full_optimizer_state,
    gather_full_state,
    is_sharded_checkpoint,
    load_state,
    load_weights,
    local_state_dict,
    open_checkpoint,
    prepare_save,
)
from lightning_pp.planning.stage_model import SplitModel

CURRENT_MODEL = "current_model_state"  # Lightning's name for the weights beside averaged ones


class PipelineState:
    """Reads and writes this rank's part of checkpoints; every method is called on all ranks.

    Args:
        split: The split model.
        mesh: Axes ``pipeline`` and ``data_parallel``.
        catalog: Names, shapes and owners of all state of the unsplit module, and its optimizers' groups.
        optimizers: This rank's optimizers.
    """

    def __init__(
        self, split: SplitModel, mesh: DeviceMesh, catalog: ParameterCatalog, optimizers: Sequence[Optimizer]
    ) -> None:
        self._module = split.module
        self._mesh = mesh
        self._catalog = catalog
        self._optimizers = list(optimizers)

    @classmethod
    def of(cls, split: SplitModel, mesh: DeviceMesh, optimizers: Sequence[Optimizer]) -> PipelineState:
        """To be called while all names are parameters and optimizers hold all of them."""

        def owners(name: str) -> tuple[int, ...]:
            if name in split.owners:
                return split.ranks_of(name)
            unit = next((unit for unit in split.units if name.startswith(unit + ".")), None)
            # code between units runs to its end on the last stage only, so that is where its buffers are right
            stage = split.placement.num_stages - 1 if unit is None else split.partition.stage_of_unit[unit]
            return (split.placement.rank_of_stage[stage],)

        catalog = ParameterCatalog.from_module(split.module, owners).with_optimizers(split.module, optimizers)
        return cls(split, mesh, catalog, optimizers)

    def model_state(self, *, full: bool, replaced: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The module's state by name: all of it on rank 0 and nothing elsewhere, or this rank's part.

        Args:
            full: All of it.
            replaced: Values of this rank that stand in the place of the module's own, such as averaged weights.
        """
        part = {**local_state_dict(self._module, self._catalog), **(replaced or {})}
        if full:
            return gather_full_state(self._module, catalog=self._catalog, mesh=self._mesh, state_dict=part)
        return part

    def optimizer_state(self, optimizer: Optimizer, *, full: bool) -> dict[str, Any]:
        """The optimizer's state as one device would have it, on rank 0; nothing for a sharded checkpoint.

        A sharded checkpoint collects the state when it is written, without a copy of it all.
        """
        if not full:
            return {}
        index = next(index for index, known in enumerate(self._optimizers) if known is optimizer)
        return gather_full_optimizer_state(
            optimizer, index, module=self._module, catalog=self._catalog, mesh=self._mesh
        )

    def prepare_save(self, checkpoint: dict[str, Any], path: Path, stager: DefaultStager | None) -> ShardedSave:
        """Collects a folder's content from what the trainer has put together; copies it if there is a stager."""
        rest = dict(checkpoint)
        state_dict = rest.pop("state_dict")
        with_optimizers = rest.pop("optimizer_states", None) is not None
        further_states = {key: rest.pop(key) for key in (CURRENT_MODEL,) if key in rest}
        return prepare_save(
            path,
            module=self._module,
            optimizers=self._optimizers if with_optimizers else [],
            catalog=self._catalog,
            mesh=self._mesh,
            rest=rest,
            state_dict=state_dict,
            further_states=further_states,
            stager=stager,
        )

    def make_room_for_file(self, path: Path) -> None:
        """Removes a sharded checkpoint from where a single file is to be written; on rank 0.

        Raises:
            IsADirectoryError: Another folder is there.
        """
        if path.is_dir():
            if not is_sharded_checkpoint(path):
                raise IsADirectoryError(f"A single-file checkpoint cannot replace the folder {path}.")
            shutil.rmtree(path)

    def open(self, path: Path, weights_only: bool | None) -> OpenedCheckpoint:
        """Opens a checkpoint of any layout."""
        return open_checkpoint(path, mesh=self._mesh, weights_only=weights_only)

    def load(self, opened: OpenedCheckpoint, content: Mapping[str, Any], *, strict: bool) -> None:
        """Loads what hooks have left of an opened checkpoint into this rank's part, optimizers included."""
        opened.load(
            module=self._module,
            optimizers=self._optimizers,
            catalog=self._catalog,
            content=content,
            strict=strict,
        )

    def load_initial_weights(self, path: Path, *, strict: bool) -> None:
        """Reads weights of any kind of file into this rank's part."""
        load_weights(path, module=self._module, catalog=self._catalog, mesh=self._mesh, strict=strict)

    def load_weights(self, opened: OpenedCheckpoint | None, state_dict: Mapping[str, Any]) -> None:
        """Loads named values into this rank's part as they are, without asking whether any are missing."""
        load_state(state_dict, self._module, self._catalog, None if opened is None else opened.reader)
