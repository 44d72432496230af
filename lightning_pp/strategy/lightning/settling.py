"""User code that may look at weights comes after the last update is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy.lightning.patching import in_place_of, replaced

# These look at weights through the strategy only, which settles. A class that is derived from one may do anything.
_LOOKS_AT_NO_WEIGHTS = frozenset(
    {
        callbacks.DeviceStatsMonitor, callbacks.EarlyStopping, callbacks.GradientAccumulationScheduler,
        callbacks.LearningRateMonitor, callbacks.ModelCheckpoint, callbacks.ModelSummary, callbacks.RichModelSummary,
        callbacks.RichProgressBar, callbacks.ThroughputMonitor, callbacks.Timer, callbacks.TQDMProgressBar,
    }
)  # fmt: skip
_EACH_BATCH = frozenset(
    {
        "lr_scheduler_step", "on_after_batch_transfer", "on_before_batch_transfer", "on_before_zero_grad",
        "on_train_batch_end", "on_train_batch_start", "optimizer_zero_grad", "transfer_batch_to_device",
    }
)  # fmt: skip
_WITH_THE_UPDATE = ("optimizer_step", "configure_gradient_clipping")


def refuse_own_updates(module: pl.LightningModule) -> None:
    """Raises :class:`ConfigurationError` if the user's code surrounds an update, and would see what is not settled."""
    for name in _WITH_THE_UPDATE:
        if getattr(type(module), name) is not getattr(pl.LightningModule, name):
            raise ConfigurationError(
                f"{type(module).__name__} overrides {name}. With optimizer_sync='deferred' gradients are not clipped "
                "there yet, and weights may be undone afterwards. Use optimizer_sync='immediate'."
            )


@contextmanager
def settled_before_hooks(
    trainer: pl.Trainer, module: pl.LightningModule, settle: Callable[[], object]
) -> Iterator[None]:
    """Within, hooks of the module, and of all callbacks but some of Lightning's and ours, run after ``settle()``.

    It is told once which of them are called in each batch, for then nothing is gained by deferring.
    """

    def run(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        settle()
        return hook(*args, **kwargs)

    found: list[str] = []
    with ExitStack() as stack:
        for owner, base, names in _owners(trainer, module):
            own = [name for name in names if getattr(type(owner), name, None) is not getattr(base, name)]
            # through the instance, where others may have put theirs in the place of the class's
            hooks = {name: in_place_of(getattr(owner, name), partial(run, getattr(owner, name))) for name in own}
            stack.enter_context(replaced(owner, **hooks))
            found += [f"{type(owner).__name__}.{name}" for name in own if name in _EACH_BATCH]
        if found:
            rank_zero_info(
                f"optimizer_sync='deferred' gains nothing in this run: each update is settled before "
                f"{', '.join(found)}, called between an update and the next step, which may look at weights."
            )
        yield


def _owners(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[Any, type, list[str]]]:
    """Whose hooks there are: object, the class that defines them all, and their names."""
    of_hooks = {name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)}
    names = sorted(name for name in of_hooks | _EACH_BATCH if not name.startswith("_"))
    yield module, pl.LightningModule, names
    if (data := getattr(trainer, "datamodule", None)) is not None:
        yield data, pl.LightningDataModule, sorted(name for name in vars(DataHooks) if not name.startswith("_"))
    every: list[Any] = getattr(trainer, "callbacks", [])
    for callback in every:
        kind = type(callback)
        if kind not in _LOOKS_AT_NO_WEIGHTS and not kind.__module__.startswith("lightning_pp."):
            yield (
                callback,
                pl.Callback,
                [name for name in vars(pl.Callback) if name.startswith(("on_", "setup", "teardown"))],
            )
