"""The progress of training, and whether a step reads it: such a step is rehearsed when progress has changed."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_pp.strategy._lightning_private import set_trainer, trainer_of

# what a trainer has from the start of a run to its end, so that it says nothing of how far the run is
_THE_SAME_ALL_THE_RUN = frozenset(
    {"strategy", "accelerator", "precision", "precision_plugin", "logger", "loggers", "datamodule", "max_epochs",
     "max_steps", "world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_devices", "device_ids",
     "is_global_zero", "default_root_dir", "log_dir", "progress_bar_callback"}
)  # fmt: skip
# functions and modules by which code can read an argument without naming it
_READ_WITHOUT_A_NAME = frozenset({"locals", "vars", "eval", "exec", "sys", "inspect"})
_OF_LOGS = frozenset(("callback_metrics", "logged_metrics", "progress_bar_metrics"))


class Progress(NamedTuple):
    """The progress of training.

    Attributes:
        batch_idx: The index of the batch.
        global_step: Optimizer steps so far.
        current_epoch: The epoch.
        stage: What the trainer does: it trains, validates, checks validation beforehand, ...
    """

    batch_idx: int
    global_step: int
    current_epoch: int
    stage: Any


def progress_of(trainer: pl.Trainer, batch_idx: int) -> Progress:
    """How far ``trainer`` is, at the batch of that index."""
    return Progress(batch_idx, trainer.global_step, trainer.current_epoch, trainer.state.stage)


class _WatchedTrainer:
    """Stands for a trainer in all reads and calls, and calls ``on_read`` with each name that is read.

    What is set (``trainer.should_stop``) stays here: a run that is not the real one may compute with made-up values.
    """

    def __init__(self, trainer: pl.Trainer, on_read: Callable[[str], None]) -> None:
        object.__setattr__(self, "_watched", (trainer, on_read))
        object.__setattr__(self, "_given", {})

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(object.__getattribute__(self, "_watched")[0])

    def __getattr__(self, name: str) -> Any:
        trainer, on_read = object.__getattribute__(self, "_watched")
        on_read(name)
        given: dict[str, Any] = object.__getattribute__(self, "_given")
        if name in given:
            return given[name]
        if name == "estimated_stepping_batches" and trainer.train_dataloader is None:
            # Lightning would set up the loaders; a step that fails here is recorded with its first batch
            raise RuntimeError("trainer.estimated_stepping_batches is not known before the loaders are")
        return getattr(trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_given")[name] = value


def unwatched(trainer: Any) -> pl.Trainer | None:
    """The trainer itself, whose reads nobody notes."""
    own: pl.Trainer | None = (
        object.__getattribute__(trainer, "_watched")[0] if type(trainer) is _WatchedTrainer else trainer
    )
    return own


@contextmanager
def trainer_watched(
    module: pl.LightningModule,
    on_read: Callable[[], None] = lambda: None,
    on_metrics: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """In the block, ``on_read`` is called when the module, or a submodule, reads changing values of its trainer.

    ``on_metrics`` is called when it asks for what has been logged. What they set on the trainer is forgotten at the
    end.
    """
    trainer = trainer_of(module)
    if trainer is None:
        yield
        return

    def note(name: str) -> None:
        if name in _OF_LOGS:
            on_metrics()
        if name not in _THE_SAME_ALL_THE_RUN:
            on_read()

    watched: Any = _WatchedTrainer(trainer, note)
    holders = [
        part for part in module.modules() if isinstance(part, pl.LightningModule) and trainer_of(part) is trainer
    ]
    for part in holders:
        set_trainer(part, watched)
    try:
        yield
    finally:
        for part in holders:
            set_trainer(part, trainer)


def reads_batch_idx(step: Callable[..., Any]) -> bool:
    """Whether ``step``, a method that is given a batch and perhaps its index, may look at the index.

    It does if its code names that argument; where the code cannot tell, as in a wrapped step, it may.
    """
    function = getattr(step, "__func__", step)
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return True
    code = function.__code__
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return True
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[1 : code.co_argcount] if inspect.ismethod(step) else names[: code.co_argcount]
    given = {name for name in ("batch_idx",) if name in names} | set(positional[1:2])
    return bool(given) and (not _READ_WITHOUT_A_NAME.isdisjoint(code.co_names) or not given.isdisjoint(_read_in(code)))


def _read_in(code: CodeType) -> set[str]:
    """The variables that ``code`` reads, or that functions in it can."""
    read = set(code.co_cellvars)
    for instruction in dis.get_instructions(code):
        if "LOAD" in instruction.opname:
            found = instruction.argval
            read.update(found if isinstance(found, tuple) else (found,))
    return read
