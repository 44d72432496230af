"""Updates by an optimizer with part of a model's parameters: without empty groups, each parameter by itself."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding.shard_updates import is_elementwise, parts_of, with_closure
from lightning_pp.split.side_effects.generators import generators_untouched, torch_generators

# an estimate over all parameters, as D-Adaptation makes it, is the same at first and not later
_NUM_TRIED = 40
_TOLERANCE = 1e-4  # of the update
_MOST_ROWS = 8
_updates: WeakKeyDictionary[Optimizer, StageUpdates] = WeakKeyDictionary()


def update_as_stage(optimizers: Sequence[Optimizer], *, has_stages: bool) -> None:
    """Has each optimizer update part of a model's parameters, now and later.

    Args:
        optimizers: Each has parameters of this rank only, whole or in shards.
        has_stages: Whether other ranks have other parameters. Otherwise only sharded ones may be divided among ranks.

    Raises:
        ConfigurationError: An optimizer combines parameters in an update, and this rank updates only some of them.
    """
    for optimizer in optimizers:
        for each in dict.fromkeys((optimizer, *parts_of(optimizer))):
            held = [parameter for group in each.param_groups for parameter in group["params"]]
            is_divided = any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in held)
            if each in _updates or not (has_stages or is_divided):
                continue
            if each in parts_of(optimizer) and not is_elementwise(each):
                _refuse_combining(each)
            _updates[each] = StageUpdates(each)


def end_stage_update(optimizer: Optimizer) -> None:
    """Puts its groups back where an update has failed; else nothing."""
    for each in (optimizer, *parts_of(optimizer)):
        if each in _updates:
            _updates[each].put_back(each)


class StageUpdates:
    """The hooks of an optimizer that hold part of a model's parameters: empty groups are not shown to ``step``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[dict[str, Any]] | None = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self.put_back(optimizer))

    def _before(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hides empty groups from the update, but not from its closure, which is the user's step."""

        def before_update(closure: Callable[[], Any]) -> Any:
            self.put_back(optimizer)
            loss = closure()
            self._hide_empty(optimizer)
            return loss

        self._hide_empty(optimizer)
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        return with_closure(before_update, args, kwargs) if has_closure else None

    def _hide_empty(self, optimizer: Optimizer) -> None:
        held = [group for group in optimizer.param_groups if group["params"]]
        if 0 < len(held) < len(optimizer.param_groups):
            self._groups, optimizer.param_groups = optimizer.param_groups, held

    def put_back(self, optimizer: Optimizer) -> None:
        """Shows all groups again; twice does no harm."""
        if self._groups is not None:
            optimizer.param_groups, self._groups = self._groups, None


def _refuse_combining(optimizer: Optimizer) -> None:
    """Tries copies of the optimizer on small parameters: some of them alone, and the same beside others."""
    held = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    if not held:
        return
    device = held[0].device
    with generators_untouched(device):
        try:
            (alone, draws), (beside, _) = (_tried(optimizer, device, has_others=others) for others in (False, True))
        except ConfigurationError:
            raise
        except Exception as error:
            rank_zero_warn(
                f"{type(optimizer).__name__} failed on copies of a few parameters ({type(error).__name__}: {error}). "
                "So it is not known whether its update combines parameters. If it does, weights differ from those of "
                "one device, because each rank updates only its own parameters."
            )
            return
    # the first draws the same random numbers in both, later ones do not
    for one, other in list(zip(alone, beside, strict=True))[: 1 if draws else None]:
        if float((one - other).abs().max()) > _TOLERANCE * max(float(one.abs().max()), float(other.abs().max())):
            raise ConfigurationError(
                f"{type(optimizer).__name__} combines parameters in an update: a parameter got another value alone "
                "than together with a second one. Here each rank updates only its own parameters, so the weights "
                "would differ from those of one device. Use an optimizer that updates each parameter separately "
                "(AdamW, SGD, ...), or turn off the option that combines parameters, such as the optimizer's own "
                "gradient clipping."
            )


@torch.no_grad()
def _tried(optimizer: Optimizer, device: torch.device, *, has_others: bool) -> tuple[list[Tensor], bool]:
    """How far copies of a parameter of each group move, beside others or not, and whether random numbers are drawn."""
    copied = _copy(optimizer, {})
    if callable(train := getattr(copied, "train", None)):
        train()  # as schedulefree's wants before a step
    own, others = [], []
    for group, original in zip(copied.param_groups, optimizer.param_groups, strict=True):
        pair = [_small(original["params"][0], device) for _ in range(1 + has_others)] if original["params"] else []
        group["params"] = pair
        if "param_names" in group:
            group["param_names"] = [f"tried.{number}" for number in range(len(pair))]
        if "lr" in group:  # a warm-up begins at 0, and with a small one estimates grow late
            group["lr"] = torch.ones_like(group["lr"]) if isinstance(group["lr"], Tensor) else 1.0
        own += pair[:1]
        others += pair[1:]
    copied.param_groups[:] = [group for group in copied.param_groups if group["params"]]
    before = [parameter.clone() for parameter in own]
    # One direction all the time, and noise: whatever is estimated over both is another than over the first.
    drawn = torch.Generator().manual_seed(0)
    directions = [torch.randn(parameter.shape, generator=drawn) for parameter in own]
    draws, calls = False, list[Tensor]()
    takes_closure = "closure" in inspect.signature(type(copied).step).parameters
    closure: list[Any] = [partial(_noted, calls)] if takes_closure else []
    for number in range(_NUM_TRIED):
        for parameter, direction in zip(own, directions, strict=True):
            parameter.grad = direction.to(parameter)
        for parameter in others:
            noise = torch.Generator().manual_seed(number)
            parameter.grad = 3 * torch.randn(parameter.shape, generator=noise).to(parameter)
        generators = torch_generators(device)
        seeded = [generator.manual_seed(number).get_state() for generator in generators]
        copied.step(*closure)
        if len(calls) > number + 1:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step calls its closure several times, to evaluate the loss at other "
                "weights, but a pipeline runs one forward and backward per step. Use an optimizer whose step takes "
                "the gradients as they are (AdamW, SGD, ...)."
            )
        draws = draws or not all(map(torch.equal, seeded, (each.get_state() for each in generators)))
    return [(parameter - first).double().cpu() for parameter, first in zip(own, before, strict=True)], draws


def _noted(calls: list[Tensor]) -> Tensor:
    calls.append(torch.zeros(()))
    return calls[-1]


def _small(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """One of as many dimensions, where equal ones stay equal."""
    shape = [min(size, _MOST_ROWS) for size in parameter.shape]
    values = torch.linspace(-1.0, 1.0, max(torch.Size(shape).numel(), 1)).reshape(shape)
    return nn.Parameter(values.to(device, parameter.dtype))


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy with everything that it keeps besides parameters, hooks and state."""
    made: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    memo.setdefault(id(optimizer.state), defaultdict(dict))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = _small(parameter, parameter.device)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(made)[name] = OrderedDict()
        elif isinstance(value, Optimizer):
            vars(made)[name] = memo[id(value)] if id(value) in memo else _copy(value, memo)
        else:
            vars(made)[name] = copy.deepcopy(value, memo)
    return made
