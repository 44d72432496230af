"""Updates of sharded parameters on shards as plain tensors, so that torch's fused and foreach kernels apply.

To torch's optimizers a DTensor is a type of its own: it is updated alone, each operation of it in Python, and not in
one call with plain parameters. What an elementwise optimizer does to a shard needs nothing but the shard, its gradient
and its state, so for the time of the update those stand in their places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.combined_optimizer import CombinedOptimizer
from lightning_pp.sharding._torch_private import as_plain_tensors, call_first_after_update, shard_itself, step_hooks
from lightning_pp.sharding.units.flat import gradient_like
from lightning_pp.sharding.whole_updates import WholeUpdates

# Each element's update depends on that element's weight, gradient and state, and on numbers of the whole tensor such as
# the count of steps. Not so Adafactor (rows and columns), Muon (matrices) and LBFGS (all parameters).
_ELEMENTWISE = frozenset(
    {
        optim.ASGD, optim.SGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
        optim.RAdam, optim.RMSprop, optim.Rprop,
    }
)  # fmt: skip
_updates: WeakKeyDictionary[Optimizer, _ShardUpdates | WholeUpdates] = WeakKeyDictionary()


def update_shards(optimizer: Optimizer) -> None:
    """Has ``optimizer`` update this rank's shards, now and later: as plain tensors, or whole parameters one by one.

    Torch's own elementwise optimizers are known, by their exact class: a class derived from one may do anything. Each
    may have plain parameters too, and get others later.
    """
    new = [each for each in parts_of(optimizer) if each not in _updates]
    for each in new:
        _updates[each] = _ShardUpdates(each) if is_elementwise(each) else WholeUpdates(each)
    if optimizer not in parts_of(optimizer) and new:
        optimizer.register_state_dict_pre_hook(_spread_all)


def _spread_all(optimizer: Optimizer) -> None:
    for each in parts_of(optimizer):
        if isinstance(updates := _updates[each], WholeUpdates):
            updates.spread(each)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Those that it combines, or it alone."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether its update of an element depends on that element's gradient and state alone.

    Torch's are known by their class. Another class says so by an attribute ``is_elementwise = True``.
    """
    is_known = type(optimizer) in _ELEMENTWISE or getattr(optimizer, "is_elementwise", False)
    return is_known and not any(group.get("differentiable") for group in optimizer.param_groups)


def is_elementwise_of_torch(optimizer: Optimizer) -> bool:
    """Whether its parameters, states and groups are all that an update reads and changes, besides gradients."""
    return type(optimizer) in _ELEMENTWISE and is_elementwise(optimizer)


def has_other_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks that are not of this package are called around its steps."""
    return any(not str(getattr(hook, "__module__", "")).startswith("lightning_pp.") for hook in step_hooks(optimizer))


def with_closure(
    run: Callable[[Callable[[], Any]], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a hook before a step returns, so that the step's closure is what ``run`` makes of the one it was given.

    Args:
        run: Is given a closure, of an update without one one that does nothing, and returns its loss.
        args: Of the step, as the hook gets them.
        kwargs: The same.
    """
    options = dict(kwargs)
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else options.pop("closure", None)
    return (args[0], partial(run, closure or (lambda: None)), *args[2:]), options


def end_update(optimizer: Optimizer) -> None:
    """Puts DTensors where they were, if the update has failed before it could; else nothing."""
    for each in parts_of(optimizer):
        if each in _updates:
            _updates[each].put_back(each)


class _ShardUpdates:
    """The hooks of an optimizer that replace DTensors by shards, and back.

    Everybody but the update itself sees DTensors: closures, hooks before and after the step, and state dicts.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._shards: list[tuple[Any, Tensor]] = []
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._state_of_shards = self._state
        optimizer.register_step_pre_hook(self._before)
        call_first_after_update(optimizer, lambda optimizer, args, kwargs: self.put_back(optimizer))

    def _before(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lets the shards in after the closure, which is after all hooks before the step."""

        def before_update(closure: Callable[[], Any]) -> Any:
            loss = closure()
            with torch.no_grad():
                self._let_in(optimizer)
            return loss

        return with_closure(before_update, args, kwargs)

    def _let_in(self, optimizer: Optimizer) -> None:
        lists: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        sharded = [parameter for parameters in lists for parameter in parameters if isinstance(parameter, DTensor)]
        if not sharded:
            return
        self._shards = [(parameter, shard_itself(parameter)) for parameter in sharded]
        shard_of: dict[int, Any] = {id(parameter): shard for parameter, shard in self._shards}
        with as_plain_tensors():
            for parameter, shard in self._shards:
                if (gradient := parameter.grad) is not None:
                    shard.grad = _local(gradient)
        self._groups = list(zip(optimizer.param_groups, lists, strict=True))
        for group, parameters in self._groups:
            group["params"] = [shard_of.get(id(parameter), parameter) for parameter in parameters]
        self._state, self._state_of_shards = optimizer.state, defaultdict(dict)
        for parameter, kept in self._state.items():
            if id(parameter) in shard_of:
                of_shard = {name: _local(value) for name, value in kept.items()}
                self._state_of_shards[shard_of[id(parameter)]] = of_shard
            else:
                self._state_of_shards[parameter] = kept
        optimizer.state = self._state_of_shards

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Puts DTensors where they were, and brings their state up to that of the shards; twice does no harm."""
        if not self._groups:
            return
        for group, parameters in self._groups:
            group["params"] = parameters
        optimizer.state = self._state
        for parameter, shard in self._shards:
            shard.grad = None  # else memory of gradients would stay until the next update
            updated = self._state_of_shards.pop(shard, None)
            if updated:
                _keep(updated, self._state[parameter], parameter, shard)
        self._state.update(self._state_of_shards)
        self._groups, self._shards = [], []
        self._state = self._state_of_shards = defaultdict(dict)


def _local(value: Any) -> Any:
    """The shard of a DTensor; any other value as it is."""
    return shard_itself(value) if isinstance(value, DTensor) else value


def _keep(updated: dict[str, Any], kept: dict[str, Any], parameter: nn.Parameter, shard: Tensor) -> None:
    """Brings the state of a parameter up to that of its shard; tensors shaped like the shard are shards themselves."""
    for name, value in updated.items():
        before = kept.get(name)
        if before is value or (isinstance(before, DTensor) and shard_itself(before) is value):
            continue
        is_sharded = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shard.shape
        kept[name] = gradient_like(parameter, value) if is_sharded else value
