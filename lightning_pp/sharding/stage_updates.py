"""Updates by an optimizer that has the parameters of one stage: without empty groups, and of each by itself."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding.shard_updates import is_elementwise, with_closure
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.side_effects.generators import generators_untouched

# an estimate over all parameters, as D-Adaptation makes it, is the same at first and not later
_NUM_COMPARED = 5
_TOLERANCE = 1e-3  # of the update
_OF_TORCH = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))
_updates: WeakKeyDictionary[Optimizer, StageUpdates] = WeakKeyDictionary()


def update_as_stage(optimizers: Sequence[Optimizer]) -> None:
    """Has each optimizer update the parameters of one stage of several, now and later."""
    for optimizer in optimizers:
        if optimizer not in _updates:
            _updates[optimizer] = StageUpdates(optimizer)


def end_stage_update(optimizer: Optimizer) -> None:
    """Puts its groups back where an update has failed; else nothing."""
    if optimizer in _updates:
        _updates[optimizer].put_back(optimizer)


class StageUpdates:
    """The hooks of an optimizer that hold part of a model's parameters.

    Groups that are empty on this stage are not shown to ``step``. In the first five updates two copies of the optimizer
    update copies of one parameter, one of them with another parameter beside it: where that makes a difference, the
    optimizer computes over all parameters, and would do so over those of a stage.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[dict[str, Any]] | None = None
        self._num_left = 0 if is_elementwise(optimizer) or _holds_more(optimizer) else _NUM_COMPARED
        self._copies: list[tuple[Optimizer, list[nn.Parameter], list[nn.Parameter]]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hides empty groups from the update, but not from its closure, which is the user's step."""

        def before_update(closure: Callable[[], Any]) -> Any:
            self.put_back(optimizer)
            loss = closure()
            if self._num_left:
                self._compare(optimizer)
            self._hide_empty(optimizer)
            return loss

        self._hide_empty(optimizer)
        return with_closure(before_update, args, kwargs)

    def _hide_empty(self, optimizer: Optimizer) -> None:
        held = [group for group in optimizer.param_groups if group["params"]]
        if 0 < len(held) < len(optimizer.param_groups):
            self._groups, optimizer.param_groups = optimizer.param_groups, held

    def _after(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.put_back(optimizer)

    def put_back(self, optimizer: Optimizer) -> None:
        """Shows all groups again; twice does no harm."""
        if self._groups is not None:
            optimizer.param_groups, self._groups = self._groups, None

    def _compare(self, optimizer: Optimizer) -> None:
        """Raises :class:`ConfigurationError` if the update of one parameter depends on another parameter."""
        if not self._copies:
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            smallest = sorted(range(len(held)), key=lambda index: held[index].numel())[:2]
            if len(smallest) < 2:
                return
            # in their order, so that an update that draws random numbers draws the same for the first
            chosen = [held[index] for index in sorted(smallest)]
            self._copies = [_copy_for(optimizer, chosen[:1]), _copy_for(optimizer, chosen)]
        self._num_left -= 1
        device = self._copies[0][1][0].device
        before = self._copies[0][2][0].detach().clone()
        for alone, originals, copies in self._copies:
            for original, own in zip(originals, copies, strict=True):
                own.grad = None if original.grad is None else original.grad.detach().clone()
            with generators_untouched(device):
                try:
                    type(optimizer).step(alone)
                except Exception:  # it needs what a copy has not; nothing is known of it then
                    self._num_left, self._copies = 0, []
                    return
        one, other = (copies[0].detach() for _, _, copies in self._copies)
        if _differ(one, other, before):
            raise ConfigurationError(
                f"{type(optimizer).__name__} combines several parameters in an update: a parameter that is updated "
                "alone gets another value than beside a second one. A stage has only its own parameters, so the "
                "weights would differ from those of one device. Take an optimizer that updates each parameter by "
                "itself (AdamW, SGD, ...), or turn off what combines parameters, such as gradient clipping by the "
                "optimizer itself."
            )
        if not self._num_left:
            self._copies = []


def _holds_more(optimizer: Optimizer) -> bool:
    """Whether it holds tensors or optimizers besides its groups and state: a copy would share them."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    return any(isinstance(leaf, (Tensor, Optimizer, nn.Module)) for leaf in leaves_of(own))


def _copy_for(
    optimizer: Optimizer, originals: list[nn.Parameter]
) -> tuple[Optimizer, list[nn.Parameter], list[nn.Parameter]]:
    """An optimizer like it, with copies of ``originals`` alone, and with their state."""
    copies = {id(original): nn.Parameter(original.detach().clone()) for original in originals}
    alone = copy.copy(optimizer)
    alone.__dict__.update(
        {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")},
        state=defaultdict(dict),
        param_groups=[],
    )
    for group in optimizer.param_groups:
        held = [copies[id(parameter)] for parameter in group["params"] if id(parameter) in copies]
        if held:
            settings = {name: copy.deepcopy(value) for name, value in group.items() if name not in _OF_PARAMETERS}
            alone.param_groups.append({**settings, "params": held})
    for original in originals:
        if original in optimizer.state:
            alone.state[copies[id(original)]] = copy.deepcopy(optimizer.state[original])
    return alone, originals, list(copies.values())


_OF_PARAMETERS = frozenset(("params", "param_names"))


def _differ(one: Tensor, other: Tensor, before: Tensor) -> bool:
    one, other, before = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other, before))
    if not one.numel():
        return False
    update = float((one - before).abs().max())
    return float((one - other).abs().max()) > _TOLERANCE * max(update, float((other - before).abs().max()))
