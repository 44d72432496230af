"""Lightning's weight averaging for a module that is split over ranks.

The callback copies the whole module before it is split and copies tensors by their order: what it copied is not what a
rank has afterwards. Here each rank averages its own part, and a checkpoint has what Lightning's has: the averaged
weights as ``state_dict``, the current ones beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_pp.checkpoint.content import CURRENT_MODEL, MODEL
from lightning_pp.split._torch_private import buffers_of, parameters_of
from lightning_pp.strategy._lightning_private import averaging_options, set_average
from lightning_pp.strategy._torch_private import children_of, is_persistent
from lightning_pp.strategy.checkpoints.checkpoints import Checkpoints
from lightning_pp.strategy.lightning.callbacks import callbacks_of
from lightning_pp.strategy.lightning.patching import replaced_in_class

_AVERAGING = "averaging_state"


def leave_averages_to_strategy(trainer: pl.Trainer) -> None:
    """Before the callbacks' ``setup``: they shall not copy the whole module; what a subclass does there, it does."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging) and "setup" not in vars(callback):
            without_copies = replaced_in_class(WeightAveraging, "setup", lambda *_, **__: None)
            vars(callback)["setup"] = without_copies(partial(_set_up, callback))


def _set_up(callback: WeightAveraging, *args: Any, **kwargs: Any) -> None:
    type(callback).setup(callback, *args, **kwargs)


def average_own_part(trainer: pl.Trainer, module: pl.LightningModule, checkpoints: Checkpoints) -> None:
    """After the split: makes for each averaging callback an average of this rank's part.

    Args:
        trainer: The trainer, about to fit.
        module: The split module.
        checkpoints: Collects the averages, and loads the current weights.
    """
    for callback in callbacks_of(trainer):
        if not isinstance(callback, WeightAveraging):
            continue
        average = PartAverage(module, **averaging_options(callback))
        set_average(callback, average)

        def save(_: Any, __: Any, checkpoint: dict[str, Any], average: PartAverage = average) -> None:
            checkpoint[CURRENT_MODEL] = checkpoint[MODEL]
            checkpoint[MODEL] = checkpoints.model_state(replaced=average.module.state_dict())
            checkpoint[_AVERAGING] = {"n_averaged": average.n_averaged.clone()}

        def load(_: Any, __: Any, checkpoint: dict[str, Any], average: PartAverage = average) -> None:
            # the module has the average now: it is loaded from "state_dict", as always
            average.take(module)
            if isinstance(current := checkpoint.get(CURRENT_MODEL), Mapping) and _AVERAGING in checkpoint:
                checkpoints.load_current_model(current)
                average.n_averaged.copy_(checkpoint[_AVERAGING]["n_averaged"])

        vars(callback).update(on_save_checkpoint=save, on_load_checkpoint=load)


class PartAverage(AveragedModel):
    """A running average of one rank's parameters and buffers, with the names and the shards that they have.

    Args:
        module: The split module; its forward is not copied.
        options: Those of :class:`torch.optim.swa_utils.AveragedModel`.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(_bare(module), **options)

    def update_parameters(self, model: nn.Module) -> None:
        """Averages shard with shard: averaging is by element, and needs nothing of other ranks."""
        whole = self.module
        local = _bare(whole, local=True)
        self.module = local
        try:
            super().update_parameters(_bare(model, local=True))
        finally:
            self.module = whole

    @torch.no_grad()
    def take(self, module: nn.Module) -> None:
        """Starts from what ``module`` has."""
        for mine, theirs in zip(_tensors(self.module), _tensors(module), strict=True):
            mine.copy_(theirs)


class _Bare(nn.Module):
    """Holds parameters, buffers and children, and computes nothing."""


def _bare(module: nn.Module, local: bool = False, seen: dict[int, Any] | None = None) -> nn.Module:
    """The tree of a module's parameters and buffers; their own tensors, or views of this rank's shards.

    What is shared stays shared.
    """
    seen = {} if seen is None else seen
    if id(module) in seen:
        shared: nn.Module = seen[id(module)]
        return shared
    bare = seen[id(module)] = _Bare()

    def held(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            value = tensor.detach()
            value = value.to_local() if local and isinstance(value, DTensor) else value
            is_parameter = isinstance(tensor, nn.Parameter)
            seen[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        found: Tensor = seen[id(tensor)]
        return found

    for name, parameter in parameters_of(module).items():
        if parameter is not None:
            bare.register_parameter(name, held(parameter))  # type: ignore[arg-type]
    for name, buffer in buffers_of(module).items():
        if buffer is not None:
            bare.register_buffer(name, held(buffer), is_persistent(module, name))
    for name, child in children_of(module).items():
        if child is not None:
            bare.add_module(name, _bare(child, local, seen))
    return bare


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
