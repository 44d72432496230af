"""torchmetrics inside a module whose steps run for real only on the last stage.

* In a step, the last stage updates its metrics, once per microbatch; ``forward`` and ``compute`` give local values,
  of which :class:`~lightning_pp.strategy.results.batch_values.BatchValues` makes the batch's where they are logged.
  Where the step is not for real (other stages, dry runs), :func:`metrics_suspended` keeps metrics out of it.
* Outside a step (Lightning at the end of an epoch, or the user in a hook), ``compute()`` is called on every rank. The
  last stages of all replicas sync their states, compute, and send the value down their pipelines.
* ``reset()`` needs nothing: it happens on every rank.
* ``update_called`` is that of the last stage, on every rank from the end of a batch on; ``update_count`` counts
  microbatches.

A metric belongs to the last stage. One that a pipelined block updates inside its own ``forward`` is not seen.
"""

from __future__ import annotations

import copy
import enum
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import BaseAggregator

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.split._torch_private import without_dispatch_modes, without_function_modes
from lightning_pp.split.data.tree import map_leaves, tensors_of
from lightning_pp.split.reductions.scaling import of_whole_batch, values_as_they_are
from lightning_pp.strategy._lightning_private import (
    computing_locally,
    forget_computed,
    is_computing_for_batch,
    keywords_for,
    set_update_count,
    update_count,
)
from lightning_pp.strategy.lightning.patching import InPlaceOf, in_place_of, replaced
from lightning_pp.strategy.results.batch_values import BatchValues

_MOST_ENTRIES = 100
_METHODS = ("forward", "update", "compute", "reset")
_values_without_data: dict[int, Any] = {}  # by the identity of a metric


class _Scope(enum.Enum):
    OUTSIDE = enum.auto()
    """`compute` means the value over all data."""
    LOCAL = enum.auto()
    """`compute` means the value of this rank's data: in a step, or in a metric's `forward`."""
    SHARED = enum.auto()
    """In the `compute` of a metric that wraps others: these sync over the replicas, without a report."""


class PipelineMetrics:
    """Makes ``compute()`` of every metric in a module give all ranks the value over all data.

    Args:
        module: The user's module.
        groups: The control groups. Metric states are gathered over ``groups.data_parallel``, through the CPU.

    Attributes:
        batch_values: What metrics computed in the steps of the batch.
        share: Of the microbatch whose step runs, in the samples of its global batch.
    """

    def __init__(self, module: nn.Module, groups: ControlGroups) -> None:
        self._module = module
        self._groups = groups
        self._scope = _Scope.OUTSIDE
        self._collected: list[Metric | MetricCollection] = []
        self.batch_values = BatchValues()
        self.share = 1.0

    def attach(self) -> None:
        """Takes over the metrics that the module has now, before each batch; finds those created since."""
        self._collected = _metrics_in(self._module)
        self.batch_values = BatchValues()
        for metric in self._collected:
            # a copy of a metric comes with torchmetrics' own `compute`, and needs ours again
            if isinstance(metric, Metric) and not isinstance(metric.compute, InPlaceOf):
                vars(metric)["compute"] = self._intercepted(metric, metric.compute)
                vars(metric)["update"] = self._unscaled(metric, metric.update)

    def detach(self) -> None:
        """Gives all metrics their own ``compute`` back."""
        for metric in _metrics_in(self._module):
            if isinstance(metric, Metric) and isinstance(metric.compute, InPlaceOf):
                vars(metric)["compute"] = metric.compute.original
                if isinstance(metric.update, InPlaceOf):
                    vars(metric)["update"] = metric.update.original

    def update_counts(self) -> list[int]:
        """How often each metric was updated since its reset, where steps run to their end."""
        return [update_count(metric) for metric in self._collected if isinstance(metric, Metric)]

    def apply_counts(self, counts: Sequence[int]) -> None:
        """Makes other ranks know what :meth:`update_counts` gave on the last stage: code asks ``update_called``."""
        metrics = (metric for metric in self._collected if isinstance(metric, Metric))
        for metric, count in zip(metrics, counts, strict=True):
            set_update_count(metric, count)

    def step(self) -> AbstractContextManager[None]:
        """In the block, metrics are updated and return local values: the last stage's run of a step."""
        return self._scoped(_Scope.LOCAL)

    def suspended(self) -> AbstractContextManager[None]:
        """:func:`metrics_suspended` for the metrics found by :meth:`attach`, without searching the module again."""
        return _suspended(self._collected, _do_nothing) if self._collected else nullcontext()

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """In the block, steps update the metrics; afterwards these are as they were before."""
        restore = self.saved()
        self.batch_values = BatchValues()
        try:
            yield
        finally:
            restore()

    def saved(self) -> Callable[[], None]:
        """A function that makes the metrics as they are now."""
        collected, copies = self._collected, _copies(self._collected)

        def restore() -> None:
            for metric, before in zip(collected, copies, strict=True):
                own = {name: value for name, value in vars(metric).items() if name in (*_METHODS, "_modules")}
                vars(metric).clear()
                vars(metric).update(vars(before) | own)

        return restore

    @contextmanager
    def _scoped(self, scope: _Scope) -> Iterator[None]:
        before, self._scope = self._scope, scope
        try:
            yield
        finally:
            self._scope = before

    def _intercepted(self, metric: Metric, compute: Callable[..., Any]) -> InPlaceOf:
        def pipeline_compute(*args: Any, **kwargs: Any) -> Any:
            if self._scope is _Scope.SHARED:
                return compute(*args, **kwargs)
            is_in_step, on_batch = self._scope is _Scope.LOCAL, is_computing_for_batch(metric)
            if is_in_step or on_batch:
                computed = functools.partial(self._locally, metric, functools.partial(compute, *args, **kwargs))
                value = computed()
                if is_in_step:
                    self.batch_values.add(metric, value, computed, on_batch=on_batch)
                return value
            return self._compute_shared(metric, functools.partial(compute, *args, **kwargs))

        return InPlaceOf(pipeline_compute, compute)

    def _unscaled(self, metric: Metric, update: Callable[..., None]) -> InPlaceOf:
        """Lets a metric add up the sums and counts of microbatches; those that average or compare get the batch's."""
        adds_up = not isinstance(metric, BaseAggregator) or isinstance(metric, (SumMetric, CatMetric))

        def update_with_own_values(*args: Any, **kwargs: Any) -> None:
            if not adds_up:
                args, kwargs = of_whole_batch((args, kwargs))
            if isinstance(metric, MeanMetric):
                args, kwargs = _with_weight(self.share, *args, **kwargs), {}
            with values_as_they_are():
                update(*args, **kwargs)

        return InPlaceOf(update_with_own_values, update)

    def _locally(self, metric: Metric, compute: Callable[[], Any]) -> Any:
        with computing_locally(metric), self._scoped(_Scope.LOCAL):
            return compute()

    def _compute_shared(self, metric: Metric, compute: Callable[[], Any]) -> Any:
        mine: list[Any] = []

        def produce() -> Any:
            with self._scoped(_Scope.SHARED), self._synced_over_replicas(metric):
                mine.append(compute())
            # clones, because pickling a view would take its whole storage along
            return _map_tensors(lambda tensor: tensor.detach().cpu().clone(), mine[0])

        value = self._groups.share(produce, f"The value of {type(metric).__name__}")
        return mine[0] if mine else _map_tensors(lambda tensor: tensor.to(metric.device), value)

    @contextmanager
    def _synced_over_replicas(self, metric: Metric) -> Iterator[None]:
        """In the block, ``metric`` and those it wraps sync over the last stage's replicas only, not over all ranks."""
        with ExitStack() as stack:
            for part in metric.modules():
                if isinstance(part, Metric):
                    if self._groups.num_replicas > 1:
                        forget_computed(part)  # a replica that had it cached would not take part in the sync
                    stack.enter_context(replaced(part, sync=functools.partial(self._sync, part)))
            yield

    def _sync(
        self,
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        type(metric).sync(
            metric,
            dist_sync_fn=dist_sync_fn or self._gather_state,
            process_group=process_group or self._groups.data_parallel,
            should_sync=should_sync,
            distributed_available=lambda: self._groups.num_replicas > 1,
        )

    def _gather_state(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Every replica's ``state``; shapes and dtypes may differ, as with a replica that saw no data."""
        gathered = self._groups.gather(state.detach().cpu().clone(), "the state of a metric")
        return [replica.to(state.device) for replica in gathered]


def metrics_suspended(
    module: nn.Module, on_call: Callable[[tuple[Any, ...]], None] | None = None, *, on_fakes: bool = False
) -> AbstractContextManager[None]:
    """In the block, no call reaches the metrics of ``module``, so a step on fake or partial values leaves them alone.

    ``forward``, ``update``, ``compute`` and ``reset`` of every :class:`torchmetrics.Metric` and of every
    :class:`torchmetrics.MetricCollection` are intercepted. ``forward`` and ``compute`` return zeros for the tensors of
    what ``compute`` returns without data.

    Args:
        module: The user's module.
        on_call: Called with all arguments (keyword arguments last, by value) of every ``forward``, ``update`` and
            ``compute``.
        on_fakes: Have ``forward`` of a differentiable metric give what a copy of it makes of its arguments, with their
            graph, in case the step trains through it.
    """
    return _suspended(_metrics_in(module), on_call or _do_nothing, on_fakes=on_fakes)


@contextmanager
def _suspended(
    metrics: Iterable[Metric | MetricCollection], on_call: Callable[..., None], *, on_fakes: bool = False
) -> Iterator[None]:
    with ExitStack() as stack:
        for metric in metrics:
            if isinstance(metric, MetricCollection):
                replacements = _collection_replacements(metric, on_call)
            else:
                replacements = _metric_replacements(metric, on_call, on_fakes=on_fakes)
            methods = {name: in_place_of(getattr(metric, name), method) for name, method in replacements.items()}
            stack.enter_context(replaced(metric, **methods))
        yield


def _metric_replacements(
    metric: Metric, on_call: Callable[..., None], *, on_fakes: bool = False
) -> dict[str, Callable[..., Any]]:
    def update(*args: Any, **kwargs: Any) -> None:
        on_call((*args, *kwargs.values()))

    def forward(*args: Any, **kwargs: Any) -> Any:
        update(*args, **kwargs)
        value = _value_without_data(metric)
        return _value_of_copy(metric, args, kwargs, value) if on_fakes and metric.is_differentiable else value

    return {
        "forward": forward,
        "compute": functools.partial(_value_without_data, metric),
        "update": update,
        "reset": _do_nothing,
    }


def _value_without_data(metric: Metric) -> Any:
    """What ``compute`` returns after a reset, with zeros for its tensors; a zero where it needs data."""
    key = id(metric)
    if key not in _values_without_data:
        _values_without_data[key] = None
        weakref.finalize(metric, _values_without_data.pop, key, None)
        with without_dispatch_modes(), without_function_modes(), warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")  # torchmetrics warns of a compute without data
            _values_without_data[key] = _own_copy(metric).compute()
    value = _values_without_data[key]
    if value is None:
        return torch.zeros((), device=metric.device)
    return _map_tensors(lambda tensor: torch.zeros_like(tensor, device=metric.device), value)


def _copies(metrics: list[Any]) -> list[Any]:
    """Copies that share states where ``metrics`` do. What has a graph keeps it, which :func:`copy.deepcopy` refuses."""
    tensors = (tensor for metric in metrics for part in metric.modules() for tensor in tensors_of(vars(part)))
    with torch.enable_grad():
        known = {id(tensor): tensor.clone() for tensor in tensors if tensor.grad_fn is not None}
    return copy.deepcopy(metrics, known)


def _own_copy(metric: Metric) -> Metric:
    """A copy with the methods of its class, that was reset and joins no other rank."""
    twin: Metric = _copies([metric])[0]
    for part in twin.modules():
        if isinstance(part, Metric):
            for name in ("forward", "reset"):
                vars(part).pop(name, None)
            part.sync_on_compute = False
    twin.reset()
    return twin


def _value_of_copy(metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Any) -> Any:
    """The value of ``metric`` on one batch; ``otherwise`` if it depends on the batch's values."""
    if not torch.is_grad_enabled():
        return otherwise
    with without_dispatch_modes():  # to a dry run this would be a write into memory that the step was given
        twin = _own_copy(metric)
    try:
        twin.reset()  # its states are copies that no operation made; new ones are the step's own
        return twin(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return otherwise


def _collection_replacements(
    collection: MetricCollection, on_call: Callable[..., None]
) -> dict[str, Callable[..., Any]]:
    # A collection's own `update` would group metrics whose states are equal, and before any data most states are.
    def forward(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics: Any = nn.ModuleDict.values(collection)  # its own `values` copies states first
        for metric in metrics:
            on_call((*args, *keywords_for(metric, kwargs).values()))
        return type(collection).compute(collection)  # of metrics that are suspended as well

    return {"forward": forward, "compute": forward, "update": forward, "reset": _do_nothing}


def _do_nothing(*_: Any) -> None:
    pass


def _with_weight(share: float, value: Any, weight: Any = None) -> tuple[Any, ...]:
    """What a mean is given: one value of a microbatch has its share of the weight that the batch's has."""
    if isinstance(weight, (int, float)) or (isinstance(value, Tensor) and value.dim() > 0):  # len(x) is the share
        return (value,) if weight is None else (value, weight)
    return value, share if weight is None else weight * share


def _metrics_in(module: nn.Module) -> list[Metric | MetricCollection]:
    """Metrics among the parts of ``module``, and in short dicts, lists and tuples that are attributes of it."""
    kinds = {Metric, MetricCollection}  # isinstance would ask every subclass of Metric for each class: 14 ms
    held = (value for key, value in vars(module).items() if type(value) in (dict, list, tuple) and key != "_modules")
    short = (value for value in held if len(value) <= _MOST_ENTRIES)
    entries = (each for value in short for each in (value.values() if isinstance(value, dict) else value))
    owners = (module, *(each for each in entries if not kinds.isdisjoint(type(each).__mro__)))
    parts = (part for owner in owners for part in owner.modules() if not kinds.isdisjoint(type(part).__mro__))
    return list({id(part): part for part in parts}.values())  # == makes another metric


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)
