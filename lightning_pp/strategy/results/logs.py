"""``self.log`` in a step that runs once per microbatch, and for real only on the last stage.

Life of one batch's logs, on every rank::

    logs = StepLogs()
    with logs.installed(module):
        for each microbatch:
            logs.begin(index if this rank holds the last stage else None)
            module.training_step(microbatch, batch_idx)
            logs.end()
    on the last stage: calls, num_samples, *_ = logs.merge_over_replicas(weights, num_samples, groups)
    replay(module, calls, num_samples)

Between ``begin`` and ``replay`` Lightning's own ``log`` does all the checking and resolving; only the last thing it
does, storing the value in the trainer's result collection, is intercepted. Of calls that differ in their number alone
Lightning sees the first of a batch. So an overridden ``log``, ``log_dict`` and every error message are as on one
device, and after the replay all ranks hold the values that one device would hold for the whole global batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import SplitError
from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.reductions.scaling import extreme_of
from lightning_pp.strategy._lightning_private import (
    ResultCollection,
    hook_that_logs_kept,
    log_resolved,
    noting_logged,
    results_of,
    set_value_on_batch,
    value_on_batch,
)
from lightning_pp.strategy.lightning.callers import line_of_user
from lightning_pp.strategy.lightning.patching import replaced
from lightning_pp.strategy.results.batch_values import BatchValues
from lightning_pp.strategy.results.formulas import Formula, ScalarFunctions, with_formulas
from lightning_pp.strategy.results.log_calls import LogCall, merge_calls, reduction_name, to_tensors

_NOT_KEPT = ("batch_size", "sync_dist", "sync_dist_fn", "sync_dist_group")


@dataclass(frozen=True)
class _Recorded:
    """A call of ``log``: its value, and the tensor that the user's code gave, or that the metric computed."""

    call: LogCall
    value: Tensor | None
    given: Tensor | None


class StepLogs:
    """The ``self.log`` calls of one batch, microbatch by microbatch.

    Attributes:
        follows_formulas: Whether a number that is made of others is computed of those of the batch.
    """

    def __init__(self, follows_formulas: bool = False) -> None:
        self.follows_formulas = follows_formulas
        self._functions: ScalarFunctions | None = None
        self._formulas: dict[str, Formula] = {}
        self._microbatches: dict[int, list[_Recorded]] = {}
        self._recorded: list[_Recorded] | None = None
        self._is_in_step = False
        self._of_whole_batch: Callable[[Any], Any] | None = None
        self._given: Any = None
        # by what `module.log` was called with beside a number: what Lightning made of that, the same all the batch
        self._resolved: dict[Any, tuple[str, dict[str, Any]]] = {}

    @contextmanager
    def installed(self, module: LightningModule) -> Iterator[None]:
        """In the block, between :meth:`begin` and :meth:`end`, ``module.log`` records here; it still checks arguments.

        Args:
            module: The user's module. In a loop that does not support logging its ``log`` is left alone and says so.

        Raises:
            SplitError: A recorded value has no data, because it depends on what only another stage has.
            ValueError: The value is neither a number nor a metric of the module.
            MisconfigurationException: As Lightning raises it.
        """
        results = results_of(module)
        if results is None:
            yield
            return
        log, log_one, reset = module.log, results.log, results.reset
        asked: list[Any] = []  # what `module.log` was called with, while Lightning looks at it

        def record(fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
            if not self._is_in_step:
                log_one(fx, name, value, *args, **options)
                return
            if not isinstance(value, (Tensor, Metric)):
                raise ValueError(f"`self.log({name}, {value})` was called, but only numbers and metrics can be logged")
            options["reduce_fx"] = reduction_name(options["reduce_fx"])
            self._resolved.update((each, (fx, options)) for each in asked)
            if (recorded := self._recorded) is not None:
                if self._of_whole_batch is not None and isinstance(value, Tensor):
                    value = self._of_whole_batch(value)
                earlier = [each.call for each in recorded if each.call.part is None]
                occurrence = sum(call.name == name and call.fx == fx for call in earlier)
                recorded.append(_recorded(module, results, fx, name, occurrence, value, options, self._given))
                recorded += self._numbers_of(recorded[-1])

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def log_in_step(name: str, value: Any, *args: Any, **options: Any) -> None:
            call = (name, *args, *options.items())
            is_number = self._is_in_step and type(value) is Tensor and value.numel() == 1
            if is_number and (known := self._resolved.get(call)) is not None:
                self._given = value
                record(known[0], name, value.clone().detach().squeeze(), **known[1])
                return
            asked[:] = [call] if is_number else []
            try:
                log(name, value, *args, **options)
            finally:
                asked.clear()

        def reset_outside(*args: Any, **kwargs: Any) -> None:
            # Lightning resets a collection at the first log of an epoch; the replay will, on every rank alike.
            if not self._is_in_step:
                reset(*args, **kwargs)

        own = {"log": log_in_step} if type(module).log is LightningModule.log else {}  # an override sees every call
        with (
            replaced(results, log=torch.compiler.disable(record), reset=reset_outside),  # type: ignore[no-untyped-call]
            replaced(module, **own, **noting_logged(module, partial(setattr, self, "_given"))),
            hook_that_logs_kept(module.trainer),
        ):
            yield

    def begin(self, microbatch: int | None, of_whole_batch: Callable[[Any], Any] | None = None) -> None:
        """A step begins.

        Args:
            microbatch: Index of the microbatch if this is the last stage's run of the step, the one with real values:
                they are recorded, in the place of what was recorded for that index. None swallows them.
            of_whole_batch: Makes logged tensors stand for the whole batch.
        """
        self._is_in_step = True
        self._of_whole_batch = of_whole_batch
        if microbatch is not None:
            self._recorded = self._microbatches[microbatch] = []

    def formulas_followed(self) -> ScalarFunctions:
        """Around the run of the step that is recorded: notes how numbers are made of others."""
        self._functions = ScalarFunctions()
        return self._functions

    def _numbers_of(self, logged: _Recorded) -> list[_Recorded]:
        """The numbers that a logged one is made of, as calls that are merged like others."""
        is_mean = logged.call.metric is None and logged.call.merging == "mean"
        found = self._functions.formula_of(logged.given) if self._functions is not None and is_mean else None
        if found is None:
            return []
        formula, numbers = found
        if any(map(is_fake, numbers)):  # of another stage, and told where it is used
            return []
        self._formulas[formula.fingerprint] = formula
        numbers = numbers if self._of_whole_batch is None else self._of_whole_batch(numbers)
        parts = [(replace(logged.call, part=(formula.fingerprint, i)), n) for i, n in enumerate(numbers)]
        return [_Recorded(replace(it, dtype=n.dtype, extreme=extreme_of(n)), n.detach(), None) for it, n in parts]

    def end(self) -> None:
        """The step has ended."""
        self._is_in_step = False
        self._recorded = self._of_whole_batch = self._functions = None

    def take_batch_values(self, metrics: BatchValues) -> None:
        """Replaces the values that ``metrics`` computed for microbatches by those for the batch."""
        places: dict[Hashable, list[tuple[int, int]]] = {}
        for index in sorted(self._microbatches):
            for place, item in enumerate(self._microbatches[index]):
                places.setdefault(item.call.key, []).append((index, place))
        of_metrics = set()
        for key, found in places.items():
            value = metrics.value_of([self._microbatches[index][place].given for index, place in found])
            for index, place in found if value is not None else ():
                of_metrics.add(key)
                recorded = self._microbatches[index]
                recorded[place] = replace(recorded[place], value=value)
        for recorded in self._microbatches.values():  # no formula makes such a value
            recorded[:] = [it for it in recorded if not it.call.part or it.call.whole_key not in of_metrics]

    def to_host(self, copies: HostCopies) -> None:
        """Replaces the recorded values by copies, since the next step may change them."""
        for index, recorded in self._microbatches.items():
            self._microbatches[index] = [
                item if item.value is None else replace(item, value=copies.copy(item.value)) for item in recorded
            ]

    def merge(self, weights: Sequence[float], num_samples: int) -> list[LogCall]:
        """What the whole batch of this replica logged: :meth:`_merge`, with numbers that are made of others."""
        return with_formulas(self._merge(weights, num_samples), self._formulas)

    def _merge(self, weights: Sequence[float], num_samples: int) -> list[LogCall]:
        """What the whole batch logged, from what its microbatches did.

        Each key is averaged by weight over the microbatches that logged it: a tensor that is logged stands for the
        whole batch (:mod:`lightning_pp.split.reductions`), a sum too. Of what is the least or greatest over samples, or
        has such a ``reduce_fx``, the least or greatest is taken. The second call with a key in each microbatch is
        merged with the other second calls: Lightning decides what calling twice means.

        A ``batch_size`` that the user gave is summed; it weighs the batch among other batches and the replica among
        replicas.

        The value of a metric on the batch has been put in before (:meth:`take_batch_values`). Over replicas it is their
        weighted mean, which is the global batch's own for accuracies and means over samples, and an approximation for
        others. Its value over the epoch is exact.

        Args:
            weights: Share of each microbatch, by index; they sum to 1.
            num_samples: Number of samples in the batch.

        Raises:
            MisconfigurationException: Two microbatches logged different kinds of values under one key.
        """
        parts: list[list[LogCall]] = []
        for index in sorted(self._microbatches):
            weight, recorded = weights[index] * num_samples, self._microbatches[index]
            numbers = [None if item.value is None else item.value.item() for item in recorded]
            parts.append([replace(i.call, value=n, weight=weight) for i, n in zip(recorded, numbers, strict=True)])
        return merge_calls(parts)

    def merge_over_replicas(
        self,
        weights: Sequence[float],
        num_samples: int,
        groups: ControlGroups,
        finding: str | None = None,
        *,
        asks_check: bool = False,
    ) -> tuple[list[LogCall], int, str | None, bool]:
        """What the global batch logged: the last stages of all replicas gather their calls and merge them alike.

        Every last stage has to call this once per batch, and to share the result with its pipeline.

        Args:
            weights: Share of each microbatch in this replica's batch.
            num_samples: Number of samples in this replica's batch.
            groups: The control groups.
            finding: What was found in this replica's batch, in words.
            asks_check: Whether this replica asks all to check their batches.

        Returns:
            The merged calls, the number of samples in the global batch, the finding of the first replica with one, and
            whether any asks for a check.

        Raises:
            Exception: What :meth:`_merge` raised on any replica.
        """
        mine: list[LogCall] | Exception
        try:
            mine = self._merge(weights, num_samples)
        except Exception as error:
            mine = error
        replicas: list[Sequence[LogCall]] = []
        total, first = 0, None
        item = (mine, num_samples, finding, asks_check)
        for calls, samples, found, asks in groups.gather(item, "what a batch has logged"):
            if isinstance(calls, Exception):
                raise calls
            replicas.append(calls)
            total += samples
            first, asks_check = first or found, asks_check or asks
        calls = with_formulas(merge_calls(replicas, by_batch_size=True), self._formulas)
        return calls, total, first, asks_check


def replay(module: LightningModule, calls: Sequence[LogCall], batch_size: int) -> None:
    """Hands ``calls`` to Lightning, on every rank in the same order and with the same values.

    Nothing is reduced again (the values are those of the global batch), and Lightning does not ask for ``sync_dist``.

    Args:
        module: The user's module.
        calls: What :meth:`StepLogs.merge_over_replicas` returned on the last stage.
        batch_size: Number of samples in the global batch: the weight of this batch in means over an epoch, unless the
            user gave one. With it, uneven batches weigh in the epoch as they do on one device.

    Raises:
        RuntimeError: The calls are of another dataloader than the one this rank is at.
        MisconfigurationException: As Lightning raises it.
    """
    results = results_of(module)
    if not calls or results is None:
        return
    for call, number in zip(calls, to_tensors(calls, module.device), strict=True):
        if call.dataloader_idx != results.dataloader_idx:
            raise RuntimeError(
                f"{call.name!r} was logged for dataloader {call.dataloader_idx}, but this rank is at "
                f"{results.dataloader_idx}: the ranks of the pipeline see different batches"
            )
        value: Any = number
        if call.metric is not None:
            value = operator.attrgetter(call.metric)(module)
            if number is not None:
                set_value_on_batch(value, number.to(value.device))
        size = batch_size if call.batch_size is None else call.batch_size
        # not `module.log`, which has seen the call when it was recorded
        log_resolved(module.trainer, results, call.fx, call.name, value, size, call.options)


def _recorded(
    module: LightningModule,
    results: ResultCollection,
    fx: str,
    name: str,
    occurrence: int,
    value: Tensor | Metric,
    options: dict[str, Any],
    given: Tensor | None,
) -> _Recorded:
    batch_size = options["batch_size"]
    kept = {key: option for key, option in options.items() if key not in _NOT_KEPT}
    metric: str | None = None
    number: Tensor | None
    if isinstance(value, Metric):
        metric = kept["metric_attribute"] = _path_of(module, value, name, kept["metric_attribute"])
        given = _value_on_batch(value, name) if kept["on_step"] else None
        number = None if given is None else given.detach().reshape(())
    else:
        number = value.detach()
        if is_fake(number):
            raise SplitError(
                f"`self.log({name!r}, ...)` in `{fx}` got a value that depends on a tensor of another stage. Log a "
                "value that the last stage computes."
            )
    call = LogCall(
        fx=fx,
        name=name,
        occurrence=occurrence,
        dataloader_idx=results.dataloader_idx,
        options=kept,
        metric=metric,
        value=None,
        dtype=torch.get_default_dtype() if number is None else number.dtype,
        weight=0.0,
        batch_size=batch_size.item() if isinstance(batch_size, Tensor) else batch_size,
        extreme=extreme_of(value) if isinstance(value, Tensor) else None,
        line=line_of_user() if isinstance(given, (int, float)) else "",
    )
    return _Recorded(call, number, given)


def _path_of(module: LightningModule, metric: Metric, name: str, attribute: str) -> str:
    """Where the other ranks find their copy of ``metric``."""
    try:
        if operator.attrgetter(attribute)(module) is metric:
            return attribute
    except AttributeError:
        pass
    for path, submodule in module.named_modules():
        if submodule is metric:
            return str(path)
    raise ValueError(
        f"`self.log({name!r}, metric)` got a {type(metric).__name__} that is not an attribute of the "
        f"{type(module).__name__} (metric_attribute={attribute!r}), so the other ranks cannot find theirs. Assign it "
        "to an attribute of the module."
    )


def _value_on_batch(metric: Metric, name: str) -> Tensor | None:
    cache = value_on_batch(metric)
    if cache is None:
        return None  # `update` was called in place of `forward`: there is no value on the batch, so none is logged
    if not isinstance(cache, Tensor) or cache.numel() != 1:
        raise ValueError(
            f"`self.log({name!r}, metric, on_step=True)` needs a metric whose value on a batch is one number, but "
            f"{type(metric).__name__} returned {cache}. Log its elements one by one, or use on_step=False."
        )
    return cache
