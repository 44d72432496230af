"""Checkpoints of metric states: the last stage owns them, and its replicas hold parts of one state.

torchmetrics writes those states into ``state_dict()`` that were added with ``persistent=True`` (or
``metric.persistent(True)``). On other stages these entries are leftovers: drop the names that
:func:`persistent_state_names` gives from every rank's own ``state_dict()``, and put in what
:func:`gather_metric_states` returns on the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_pp.distributed.control import ControlGroups

State = Tensor | list[Tensor]

_SPLIT = (dim_zero_sum, dim_zero_cat)  # states whose parts, over the replicas, make up the whole
_SHARED = (dim_zero_mean, dim_zero_max, dim_zero_min)  # states that may be the whole on every replica


def persistent_state_names(module: nn.Module) -> list[str]:
    """Names in ``module.state_dict()`` that are metric states."""
    return [name for name, _, _ in _persistent_states(module)]


def gather_metric_states(module: nn.Module, groups: ControlGroups) -> dict[str, State]:
    """The persistent metric states over all replicas, by name, on the CPU; every rank of the last stage has to call it.

    Parts are put together as the state's ``dist_reduce_fx`` says (sum, mean, max, min, cat). States with another
    reduction, or none, cannot be put back into a metric once reduced: for these the first replica's stand for all, as
    in Lightning's data-parallel strategies.

    Returns:
        The states on the last stage, the same on every replica; nothing on other stages.
    """
    if not groups.is_last_stage:
        return {}
    mine = {name: _on_cpu(getattr(metric, key)) for name, metric, key in _persistent_states(module)}
    replicas = groups.gather(mine)
    return {
        name: _merged([replica[name] for replica in replicas], metric._reductions[key])
        for name, metric, key in _persistent_states(module)
    }


def load_metric_states(module: nn.Module, states: Mapping[str, Any], groups: ControlGroups) -> None:
    """Puts ``states`` (of :func:`gather_metric_states`, or of a one-device checkpoint) into the metrics of ``module``.

    Sums and lists go to the first replica's last stage, the others start empty, so that the next sync over the replicas
    gives the whole once. Names that ``states`` lacks are left alone; names that are no metric states are ignored.
    """
    for name, metric, key in _persistent_states(module):
        if name not in states:
            continue
        is_owner = groups.is_last_stage and (groups.replica == 0 or metric._reductions[key] in _SHARED)
        state = states[name] if is_owner else metric._defaults[key]
        setattr(metric, key, _on_device(state, metric.device))
        metric._computed = None


def _persistent_states(module: nn.Module) -> Iterator[tuple[str, Metric, str]]:
    for path, metric in module.named_modules():
        if isinstance(metric, Metric):
            for key, is_persistent in metric._persistent.items():
                if is_persistent:
                    yield f"{path}.{key}" if path else key, metric, key


def _merged(parts: list[State], reduction: Any) -> State:
    if len(parts) == 1 or reduction not in _SPLIT + _SHARED:
        return parts[0]
    if isinstance(parts[0], list):
        return [element for part in parts for element in part]
    if reduction is dim_zero_cat:
        return torch.cat(parts)  # type: ignore[arg-type]
    return reduction(torch.stack(parts))  # type: ignore[no-any-return, arg-type]


def _on_cpu(state: State) -> State:
    return _on_device(state, torch.device("cpu"))


def _on_device(state: State, device: torch.device) -> State:
    if isinstance(state, list):
        return [element.detach().to(device, copy=True) for element in state]
    return deepcopy(state.detach()).to(device)
