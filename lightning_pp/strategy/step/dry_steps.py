"""Calls the user's step outside of a loop, to record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pp.errors import BatchError, ConfigurationError, SplitError
from lightning_pp.split._torch_private import version_of
from lightning_pp.split.data.tree import entries_of, own_containers, places_written, tensors_of
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.record.source_lines import innermost_user_line, user_line
from lightning_pp.split.record.sources import storage_of
from lightning_pp.split.reductions.recording import is_number
from lightning_pp.strategy._lightning_private import trainer_of
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy
from lightning_pp.strategy.lightning.patching import replaced
from lightning_pp.strategy.results.metrics import metrics_suspended
from lightning_pp.strategy.results.outputs import loss_of
from lightning_pp.strategy.step.held_output import output_held
from lightning_pp.strategy.step.progress import reads_batch_idx, trainer_watched
from lightning_pp.strategy.step.refusals import check_loss, repeated_changes_refused


def logging_to(
    module: pl.LightningModule, sink: Callable[[Any], None], note: Callable[[str], None] = lambda _: None
) -> AbstractContextManager[None]:
    """In the block, ``module.log`` only passes its arguments to ``sink``; no loop needs to run.

    Numbers become tensors as in Lightning's own, so that it can be seen how they grow with the batch.

    Args:
        module: The user's module.
        sink: Gets each value.
        note: Gets the name of each value.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        _check_loggable(name, value)
        note(name)
        sink(torch.tensor(value) if is_number(value) else value)

    return replaced(module, log=log)


def _check_loggable(name: str, value: Any) -> None:
    """Raises what Lightning's own raises, here on every rank and not only where the last stage is."""
    if value is None or isinstance(value, (str, Mapping, list, tuple)):
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"`self.log({name}, ...)` was called with a tensor of shape {tuple(value.shape)}, but it must have a "
            "single element. Log its mean, or one of its elements."
        )


class _MutedLogger(DummyLogger):
    """Writes nothing, and calls ``on_use`` when code logs."""

    def __init__(self, on_use: Callable[[], None]) -> None:
        super().__init__()
        self._on_use = on_use

    @property
    def experiment(self) -> Any:
        self._on_use()
        return super().experiment

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self._on_use()

    def __getattr__(self, name: str) -> Any:  # log_image, log_table and the like
        return lambda *args, **kwargs: self._on_use()


@contextmanager
def loggers_muted(trainer: pl.Trainer | None, on_use: Callable[[], None] = lambda: None) -> Iterator[None]:
    """In the block, values that a step passes to a logger itself, not by ``self.log``, are dropped: they may be fake.

    Args:
        trainer: The trainer; None for none.
        on_use: Called each time that a logger is used.
    """
    if trainer is None:
        yield
        return
    before = trainer.loggers
    trainer.loggers = [_MutedLogger(on_use) for _ in before]
    try:
        yield
    finally:
        trainer.loggers = before


def collectives_refused(module: pl.LightningModule, step: str) -> AbstractContextManager[None]:
    """In the block, the step may not call collectives of the strategy that wait for other ranks."""
    trainer = trainer_of(module)
    strategy = None if trainer is None else trainer.strategy
    return strategy.within_step(step) if isinstance(strategy, MeshStrategy) else nullcontext()


def first_arguments(module: pl.LightningModule, step: str, *, has_several_loaders: bool = False) -> list[Any]:
    """What follows the batch in the step's first call, as Lightning's loops give it.

    Args:
        module: The user's module.
        step: Name of its step.
        has_several_loaders: Whether the loop goes through several loaders in turn, and tells which.
    """
    takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
    return [0] * (takes_index + has_several_loaders)


def call_step(module: pl.LightningModule, step: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's step.

    Raises:
        ConfigurationError: It raises ``StopIteration``, by which Lightning ends an epoch: others may not be there yet.
            Or see :func:`repeated_changes_refused`.
    """
    try:
        with repeated_changes_refused(module, step):
            return getattr(module, step)(*args, **kwargs)
    except StopIteration as error:
        raise ConfigurationError(
            f"{step} raised StopIteration, at {innermost_user_line(error)}. In a pipeline a step cannot end an epoch, "
            "because stages may be at other batches. To end it, return -1 from on_train_batch_start or set "
            "trainer.should_stop."
        ) from error


def recorded_step(
    module: pl.LightningModule,
    step: str,
    batch: Any,
    rest: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: Precision,
    trains: bool,
) -> Callable[[DryRun], Any]:
    """The user's step on one microbatch, for :func:`lightning_pp.split.dry_run.run`.

    Every run gets the batch in containers of its own. What it logs and hands to metrics is recorded as needed at the
    end; nothing is logged and no metric updated.

    Args:
        module: The user's module.
        step: Name of its step.
        batch: The microbatch.
        rest: What follows the batch in the step's call.
        kwargs: Keyword arguments of the call.
        precision: Its forward context is entered around the step.
        trains: Whether the step has to return a loss.
    """

    def run(dry: DryRun) -> Any:
        logged: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(collectives_refused(module, step))
            stack.enter_context(precision.forward_context())
            stack.enter_context(logging_to(module, dry.need_at_end, logged.append))
            stack.enter_context(loggers_muted(trainer_of(module), partial(_warn_logger_called, step)))
            stack.enter_context(metrics_suspended(module, dry.need_at_end, on_fakes=trains))
            if reads_batch_idx(getattr(module, step)):
                dry.note_progress_read()
            own, shared = dry.own(batch), dict(entries_of(batch, "batch"))
            given = own_containers(own)
            versions = _versions(given)
            with (
                trainer_watched(module, dry.note_progress_read, partial(_warn_metrics_read, step, logged)),
                output_held(),
            ):
                output = call_step(module, step, own, *rest, **(kwargs or {}))
            _refuse_shared_writes(step, shared, batch)
            if isinstance(dry, DryRun):
                dry.record.logged = tuple(logged)
                edits_contents = _versions(given) != versions
                _warn_of_hooks(module, step, places_written(given, own), edits_contents=edits_contents)
                of_batch = {storage_of(each) for _, each in entries_of(own, "batch") if isinstance(each, Tensor)}
                for edit in (edit for storage, edit in dry.edits.items() if storage not in of_batch):
                    _check_written_elsewhere(step, *edit)
        if trains:
            check_loss(loss_of(output), module)  # here every rank sees it, in the step only the last stage
        return output

    return run


def _warn_logger_called(step: str) -> None:
    rank_zero_warn(
        f"{step} calls a logger itself, at {user_line()}. A pipeline makes this call once for each microbatch, on the "
        "rank of the last stage. Most loggers write on rank 0 only, so the values may be lost. Use self.log, or return "
        "what is to be logged and log it in a hook such as on_train_batch_end."
    )


def _warn_metrics_read(step: str, logged: Sequence[str]) -> None:
    if logged:
        rank_zero_warn(
            f"{step} reads the trainer's metrics after it has logged, at {user_line()}. In a pipeline a step logs for "
            "one microbatch, and the trainer gets the batch's values only after the step. Here the trainer still has "
            "those of the previous batch. Use the value itself, or read metrics in a hook such as on_train_batch_end."
        )


def _versions(batch: Any) -> list[int]:
    return [version_of(tensor) for tensor in tensors_of(batch) if not tensor.is_inference()]


def _check_written_elsewhere(step: str, line: str, changes_content: bool) -> None:
    text = (
        f"{step} writes in place, at {line}, into a tensor that is neither in its batch nor an attribute of the "
        "module. A pipeline runs this line once for each microbatch, and not on all stages, so the tensor differs from "
        f"that of one device. {'' if changes_content else 'It does not if the step overwrites it. '}Make it a buffer "
        "or an attribute of the module itself. In an object or a container of the module, set it anew: total = total + "
        "value."
    )
    if changes_content:
        raise SplitError(text)
    rank_zero_warn(text)


def _refuse_shared_writes(step: str, before: Mapping[str, Any], batch: Any) -> None:
    """Raises :class:`BatchError` if ``batch``, of which the step had containers of its own, has other entries now."""
    after, again = dict(entries_of(batch, "batch")), dict(entries_of(batch, "batch"))
    written = [
        place
        for place in dict.fromkeys((*before, *after))
        # some containers make what they are asked for, another each time
        if before.get(place, after) is not after.get(place, before) and after.get(place) is again.get(place)
    ]
    if written:
        raise BatchError(
            f"{step} writes into {', '.join(written[:3])}, an attribute of an object that copy.copy cannot copy. A "
            "step runs several times on a microbatch, on each stage, and each run must get the unchanged batch. Give "
            "the object's class a __copy__ method, or put its tensors into a dict or a dataclass."
        )


def _warn_of_hooks(module: pl.LightningModule, step: str, places: Sequence[str], *, edits_contents: bool) -> None:
    """Warns of hooks that get a batch after a step that writes into it: they do not see what it wrote."""
    hook = f"on_{step.replace('training', 'train').removesuffix('_step')}_batch_end"
    trainer = trainer_of(module)
    owners: list[Any] = [module, *(trainer.callbacks if trainer is not None else [])]  # type: ignore[attr-defined]
    looking = [
        type(owner).__name__
        for owner in owners
        if getattr(type(owner), hook, None) not in (getattr(pl.LightningModule, hook), getattr(pl.Callback, hook))
        and not type(owner).__module__.startswith(("lightning.", "lightning_pp."))
    ]
    if looking and (places or edits_contents):
        rank_zero_warn(
            f"{step} of {type(module).__name__} writes into its batch ({', '.join(places[:3]) or 'in place'}). In a "
            f"pipeline every run of the step gets the unchanged batch, and so does {hook} of {', '.join(looking)}, "
            "which on one device would see what the step wrote. Return from the step what the hook needs."
        )
