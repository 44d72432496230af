"""Updates of sharded parameters on shards as plain tensors, so that torch's fused and foreach kernels apply.

To torch's optimizers a DTensor is a type of its own: it is updated alone, each operation of it in Python, and not in
one call with plain parameters. What an elementwise optimizer does to a shard needs nothing but the shard, its gradient
and its state, so for the time of the update those stand in their places.

Shards and their state are kept from update to update. What costs something for each parameter then is to compare what
they were made of with what is there now, object by object, and to set and take away a gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import is_
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


def forget_shards(optimizer: Optimizer) -> None:
    """Lets go of the memory of shards and states that is kept from update to update; the next one makes it again.

    To be called before parameters or states move to another device, so that the memory which they leave is free.
    """
    for each in parts_of(optimizer):
        if isinstance(updates := _updates.get(each), _ShardUpdates):
            updates.forget()


class _ShardUpdates:
    """The hooks of an optimizer that replace DTensors by shards, and back.

    Everybody but the update itself sees DTensors: closures, hooks before and after the step, and state dicts.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._parameters = _Parameters([])
        self._state: _State | None = None
        optimizer.register_step_pre_hook(self._before)
        call_first_after_update(optimizer, lambda optimizer, args, kwargs: self.put_back(optimizer))
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: self.forget())

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

    def forget(self) -> None:
        """Frees what is kept for the next update, which makes it again."""
        self._parameters, self._state = _Parameters([]), None

    def _let_in(self, optimizer: Optimizer) -> None:
        lists: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        if not self._parameters.are(lists):
            self._parameters, self._state = _Parameters(lists), None
        if not self._parameters.sharded:
            return
        if self._state is None or not self._state.is_of(optimizer):
            self._state = _State(optimizer, self._parameters)
        self._groups = list(zip(optimizer.param_groups, lists, strict=True))
        self._parameters.give_gradients()
        for (group, _), parameters in zip(self._groups, self._parameters.lists, strict=True):
            group["params"] = parameters
        optimizer.state = self._state.of_shards

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Puts DTensors where they were, and brings their state up to that of the shards; twice does no harm."""
        if not self._groups:
            return
        for group, parameters in self._groups:
            group["params"] = parameters
        self._groups = []
        self._parameters.take_gradients()
        assert self._state is not None
        if not self._state.put_back(optimizer, self._parameters):
            self._state = None


class _Parameters:
    """The parameters of an optimizer, and its groups of parameters with shards in the places of DTensors."""

    def __init__(self, lists: list[list[nn.Parameter]]) -> None:
        self._sizes = list(map(len, lists))
        self._all = list(chain.from_iterable(lists))
        self._whole = [parameter for parameter in self._all if not isinstance(parameter, DTensor)]
        self.sharded: list[Any] = [parameter for parameter in self._all if isinstance(parameter, DTensor)]
        self.shards: list[Tensor] = list(map(shard_itself, self.sharded))
        self.shard_of = dict(zip(map(id, self.sharded), self.shards, strict=True))
        self.lists = [[self.shard_of.get(id(parameter), parameter) for parameter in group] for group in lists]

    def are(self, lists: list[list[nn.Parameter]]) -> bool:
        """Whether these groups of parameters are still those, with the same shards."""
        return (
            list(map(len, lists)) == self._sizes
            and _are_same(list(chain.from_iterable(lists)), self._all)
            and _are_same(list(map(shard_itself, self.sharded)), self.shards)
            and not any(isinstance(parameter, DTensor) for parameter in self._whole)
        )

    def give_gradients(self) -> None:
        with as_plain_tensors():
            for shard, parameter in zip(self.shards, self.sharded, strict=True):
                gradient = parameter.grad
                if gradient is not None:
                    shard.grad = shard_itself(gradient) if isinstance(gradient, DTensor) else gradient

    def take_gradients(self) -> None:
        """Else memory of gradients would stay until the next update."""
        for shard in self.shards:
            shard.grad = None


class _State:
    """The state of an optimizer, and ``of_shards``: the same memory as the state that an update of shards has.

    The state of a parameter is a dict from names to values. Of plain parameters it is the same dict in both.
    """

    def __init__(self, optimizer: Optimizer, parameters: _Parameters) -> None:
        self._state = optimizer.state
        self._parameters, self._dicts, self._values = _contents(self._state)
        self._written: list[Any] = []
        self.of_shards: defaultdict[Tensor, Any] = defaultdict(partial(_OfShard, self._written))
        for parameter, kept in self._state.items():
            shard = parameters.shard_of.get(id(parameter))
            if shard is None:
                self.of_shards[parameter] = kept
            else:
                local = {name: shard_itself(v) if isinstance(v, DTensor) else v for name, v in kept.items()}
                self.of_shards[shard] = _OfShard(self._written, local)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has this state still, with nothing put in or replaced by others."""
        if optimizer.state is not self._state:
            return False
        parameters, dicts, values = _contents(self._state)
        return (
            _are_same(parameters, self._parameters)
            and _are_same(dicts, self._dicts)
            and _are_same(values, self._values)
        )

    def put_back(self, optimizer: Optimizer, parameters: _Parameters) -> bool:
        """Whether the update has worked in this memory alone; if not, brings the optimizer's state up to its own."""
        optimizer.state = self._state
        if not self._written and len(self.of_shards) == len(self._parameters):
            return True
        for parameter, shard in zip(parameters.sharded, parameters.shards, strict=True):
            updated = self.of_shards.pop(shard, None)
            if updated:
                _keep(updated, self._state[parameter], parameter, shard)
        for parameter, new in self.of_shards.items():
            self._state[parameter] = dict(new) if isinstance(new, _OfShard) else new
        return False


class _OfShard(dict[str, Any]):
    """The state of one shard, which notes in ``written`` that something else has been put into it.

    Torch's optimizers put things in by name only.
    """

    def __init__(self, written: list[Any], content: dict[str, Any] | None = None) -> None:
        super().__init__(content or {})
        self._written = written

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name, self) is not value:
            self._written.append(name)
        super().__setitem__(name, value)


def _contents(state: dict[Tensor, Any]) -> tuple[list[Tensor], list[Any], list[Any]]:
    """What a state consists of: to compare it object by object takes much less than to go through it."""
    dicts = list(state.values())
    return list(state), dicts, list(chain.from_iterable(map(dict.values, dicts)))


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _keep(updated: dict[str, Any], kept: dict[str, Any], parameter: nn.Parameter, shard: Tensor) -> None:
    """Brings the state of a parameter up to that of its shard; tensors shaped like the shard are shards themselves."""
    for name, value in updated.items():
        before = kept.get(name)
        if before is value or (isinstance(before, DTensor) and shard_itself(before) is value):
            continue
        is_sharded = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shard.shape
        kept[name] = gradient_like(parameter, value) if is_sharded else value
