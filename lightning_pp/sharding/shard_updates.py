"""Updates of sharded parameters that see shards as plain tensors, so that torch's fused and foreach ways apply.

To torch's optimizers a DTensor is a type of its own: it is updated alone, each operation of it in Python, and not in
one call with plain parameters. What an elementwise optimizer does to a shard needs nothing but the shard, its gradient
and its state, so for the time of the update those stand in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding._torch_private import call_first_after_update, shard_itself
from lightning_pp.sharding.units.flat import gradient_like

# Each element's update depends on that element's weight, gradient and state, and on numbers of the whole tensor such as
# the count of steps. Not so Adafactor (rows and columns), Muon (matrices) and LBFGS (all parameters).
_ELEMENTWISE = frozenset(
    {
        optim.ASGD, optim.SGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
        optim.RAdam, optim.RMSprop, optim.Rprop,
    }
)  # fmt: skip
_updates: WeakKeyDictionary[Optimizer, _ShardUpdates] = WeakKeyDictionary()


def update_shards(optimizer: Optimizer) -> None:
    """Has ``optimizer`` update this rank's shards as plain tensors, now and later; nothing if it must see whole ones.

    Torch's own elementwise optimizers are known, by their exact class: a class derived from one may do anything. It may
    have plain parameters too, and get others later.

    Raises:
        ConfigurationError: It must see whole tensors, some of its parameters are sharded and some are not, and
            ``foreach`` or ``fused`` asks for one call over all of them.
    """
    if optimizer in _updates:
        return
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if type(optimizer) in _ELEMENTWISE and not is_differentiable:
        _updates[optimizer] = _ShardUpdates(optimizer)
        return
    for group in optimizer.param_groups:
        num_sharded = sum(isinstance(parameter, DTensor) for parameter in group["params"])
        num_whole = len(group["params"]) - num_sharded
        for flag in ("foreach", "fused"):
            if group.get(flag) and num_sharded and num_whole:
                raise ConfigurationError(
                    f"{type(optimizer).__name__}({flag}=True) updates all parameters in one call. {num_sharded} "
                    f"parameters of this rank are sharded and {num_whole} are whole, and torch does not mix them. "
                    f"Leave out {flag}=True."
                )


def end_update(optimizer: Optimizer) -> None:
    """Puts DTensors where they were, if the update has failed before it could; else nothing."""
    if optimizer in _updates:
        _updates[optimizer].put_back(optimizer)


class _ShardUpdates:
    """The hooks of an optimizer that put shards in the place of DTensors, and back.

    Everybody but the update itself sees DTensors: closures, hooks before and after the step, and state dicts.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._shards: list[tuple[nn.Parameter, Tensor]] = []
        optimizer.register_step_pre_hook(self._before)
        call_first_after_update(optimizer, self._after)

    def _before(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lets the shards in after the closure, which is after all hooks before the step."""
        options = dict(kwargs)
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else options.pop("closure", None)

        def closure_before_update() -> Any:
            loss = None if closure is None else closure()
            with torch.no_grad():
                self._let_in(optimizer)
            return loss

        return (args[0], closure_before_update, *args[2:]), options

    def _after(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.put_back(optimizer)

    def _let_in(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            if any(isinstance(parameter, DTensor) for parameter in parameters):
                self._groups.append((group, parameters))
                group["params"] = [self._shard_of(parameter, optimizer.state) for parameter in parameters]

    def _shard_of(self, parameter: nn.Parameter, state: Any) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        shard = shard_itself(parameter)
        gradient = parameter.grad
        if gradient is not None:
            shard.grad = shard_itself(gradient) if isinstance(gradient, DTensor) else gradient
        if parameter in state:
            kept = state[parameter].items()
            state[shard] = {name: shard_itself(value) if isinstance(value, DTensor) else value for name, value in kept}
        self._shards.append((parameter, shard))
        return shard

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Puts DTensors where they were, and brings their state up to that of the shards; twice does no harm."""
        for group, parameters in self._groups:
            group["params"] = parameters
        state: Any = optimizer.state
        for parameter, shard in self._shards:
            shard.grad = None
            updated = state.pop(shard, None)
            if updated:
                _keep(updated, state[parameter], parameter, shard)
        self._groups, self._shards = [], []


def _keep(updated: dict[str, Any], kept: dict[str, Any], parameter: nn.Parameter, shard: Tensor) -> None:
    """Brings the state of a parameter up to that of its shard; tensors shaped like the shard are shards themselves."""
    for name, value in updated.items():
        before = kept.get(name)
        if before is value or (isinstance(before, DTensor) and shard_itself(before) is value):
            continue
        is_sharded = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shard.shape
        kept[name] = gradient_like(parameter, value) if is_sharded else value
