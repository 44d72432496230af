"""The position in the training data within an epoch, and resuming from it with the same batches and draws.

Lightning keeps the states of loaders that have one (``state_dict``). Of others it keeps nothing, and begins the data of
the epoch again. Here a :class:`DataLoader` over a dataset with indices is made to remember the generators that an epoch
began with. A resumed epoch begins with these, and as many batches are read and dropped as were trained: workers draw
what they drew then, whatever sampler, dataset or ``collate_fn`` may draw. Then all generators are as they were
at the save.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_pp.errors import CheckpointError
from lightning_pp.strategy._lightning_private import ask_for_loaders_again
from lightning_pp.strategy.step.first_look import watch
from lightning_pp.strategy.step.loader_state import (
    epochs_of,
    host_draws,
    own_draws,
    samplers_with_epochs,
    set_host_draws,
    set_own_draws,
)

_FOLLOWED = "_lightning_pp_pass"


class DataPosition:
    """The loaders of the training of ``trainer``."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._resumed: Mapping[str, Any] | None = None
        self._num_resumed = 0
        self._current: list[Any] | None = None
        self._ignored: Any = None

    def follow(self, loader: Any) -> object:
        """Wraps a training loader so that its position is known, and resumed if a checkpoint was loaded.

        Raises:
            CheckpointError: The checkpoint stands within an epoch, and this loader cannot go on there.
        """
        if not self.is_iterated:
            return loader
        if _can_be_followed(loader):
            one = vars(loader)[_FOLLOWED] = _Pass(loader, self)
            watch(loader, "position", one.begin)
        if self._resumed is None:
            return loader
        states = self._resumed["loaders"]
        state = states[self._num_resumed] if self._num_resumed < len(states) else None
        self._num_resumed += 1
        if _can_be_followed(loader) and state is not None:
            vars(loader)[_FOLLOWED].resumed = state
            return loader
        done = self._resumed["num_batches"]
        if done == 0 or _has_state(loader):
            return loader
        if isinstance(loader, Sequence):
            return _Rest(loader, done)
        raise CheckpointError(
            f"The checkpoint was saved after {done} batches of epoch {self._resumed['epoch']}, and the training data "
            f"cannot be restored there: {_why_not(loader)}. Or resume from a checkpoint that was saved at the end of "
            "an epoch."
        )

    def state(self) -> dict[str, Any] | None:
        """Where the loaders stand; None outside of a training."""
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING or trainer.train_dataloader is None:
            return None
        progress = trainer.fit_loop.epoch_loop.batch_progress
        ready = progress.current.ready
        if progress.is_last_batch or ready >= trainer.num_training_batches:
            ready = 0  # what comes next is another epoch
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        passes: list[_Pass | None] = [getattr(loader, _FOLLOWED, None) for loader in loaders]
        followed = [each for each in passes if each is not None]
        if ready and followed and max(each.num_batches for each in followed) != ready:
            passes = [None] * len(loaders)  # something else has read from the loaders
        states = [None if each is None else each.state(is_within=ready > 0) for each in passes]
        # what an epoch is numbered that is about to be trained: it is started where its batches are
        started: Any = trainer.fit_loop.epoch_progress.current
        epoch = trainer.current_epoch if ready else started.started
        return {"num_batches": ready, "epoch": epoch, "loaders": states, "now": host_draws()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Makes the loaders of the next training resume at the position of :meth:`state`."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            return
        self._resumed, self._num_resumed = state, 0
        self._current = list(state["now"])
        if state["num_batches"]:
            ask_for_loaders_again(self._trainer)
        # until the first batch: Lightning sees no state, and warns of batches that come again
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        self._ignored = warnings.filters[0]

    @property
    def is_iterated(self) -> bool:
        """Whether loaders are asked for batches to train with."""
        return self._trainer.state.fn == TrainerFn.FITTING and bool(self._trainer.training)

    @property
    def epoch(self) -> int:
        """The epoch with which a resumed training continues, as samplers get it."""
        return 0 if self._resumed is None else int(self._resumed["epoch"])

    def begin(self) -> None:
        """After the hooks that a resumed training calls again, and before those of an epoch.

        Raises:
            CheckpointError: The checkpoint stands within an epoch, and the loaders were made before it was loaded.
        """
        if self._resumed is not None:
            if self._resumed["num_batches"] and not self._num_resumed:
                raise CheckpointError(
                    f"The checkpoint was saved after {self._resumed['num_batches']} batches of epoch "
                    f"{self._resumed['epoch']}, and the training data cannot be restored there: the loaders were used "
                    "before it was loaded, as by trainer.estimated_stepping_batches in configure_optimizers. Compute "
                    "the number of steps in another way, or resume from the end of an epoch."
                )
            self.put_current()
            if self._resumed["num_batches"] == 0:
                self._current = None  # the hooks of the epoch's beginning draw
        self._resumed = None

    def restore_current(self) -> None:
        """Puts the generators of this process to where they were at the save; once, before the first batch."""
        if self._ignored in warnings.filters:
            cast(list[Any], warnings.filters).remove(self._ignored)
        self.put_current()
        self._current = None

    def put_current(self) -> None:
        """As :meth:`restore_current`, and once more before the first batch: hooks between may draw."""
        if self._current is not None:
            set_host_draws(self._current)

    def note_current(self) -> None:
        """Before the first batch: makes the generators continue from their present state."""
        if self._current is not None:
            self._current = host_draws()


class _Pass:
    """One pass of ``loader`` over its data; ``position`` is the training's."""

    def __init__(self, loader: Any, position: DataPosition) -> None:
        self.loader, self.position = loader, position
        self.num_batches = 0
        self.resumed: Mapping[str, Any] | None = None
        self._began: Any = None
        self._first: Any = None
        self._epochs: list[int] = []

    def state(self, *, is_within: bool) -> dict[str, Any]:
        """The state that :meth:`begin` needs to continue: within an epoch, or with the next one."""
        own = own_draws(self.loader)
        if not is_within:
            return {"own": own}
        return {
            "num_batches": self.num_batches,
            "began": self._began,
            "first": self._first,
            "own": own,
            "epochs": self._epochs,
        }

    def begin(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Starts a pass to train with: makes the loader's iterator at once, and does the rest with the batches."""
        if not self.position.is_iterated:
            return iterate()
        state, self.resumed = self.resumed, None
        self.num_batches = 0
        if state is None:
            self._begin_anew()
            return self._counted(iterate(), is_resumed=False)
        if "began" not in state:  # an epoch from its beginning
            self.position.put_current()
            set_own_draws(self.loader, state["own"])
            for sampler in samplers_with_epochs(self.loader):
                sampler.set_epoch(self.position.epoch)
            self._begin_anew()
            batches = iterate()
            self.position.note_current()
            return self._counted(batches, is_resumed=True)
        self._began, self._first, self._epochs = state["began"], state["first"], list(state["epochs"])
        for sampler, epoch in zip(samplers_with_epochs(self.loader), self._epochs, strict=False):
            sampler.set_epoch(epoch)
        self._set(self._began)
        batches = iterate()
        self._set(self._first)
        for _ in range(state["num_batches"]):
            next(batches)
        self.num_batches = state["num_batches"]
        set_own_draws(self.loader, state["own"])
        self.position.put_current()
        return self._counted(batches, is_resumed=True)

    def _begin_anew(self) -> None:
        self._began, self._first = self._all(), None
        self._epochs = epochs_of(self.loader)

    def _counted(self, batches: Iterator[Any], *, is_resumed: bool) -> Iterator[Any]:
        if is_resumed:
            self.position.restore_current()
        if self._first is None:
            self._first = self._all()
            self._epochs = epochs_of(self.loader)
        for batch in batches:
            self.num_batches += 1
            yield batch

    def _all(self) -> list[Any]:
        return [host_draws(), own_draws(self.loader)]

    def _set(self, draws: Sequence[Any]) -> None:
        set_host_draws(draws[0])
        set_own_draws(self.loader, draws[1])


class _Rest(Sequence[Any]):
    """A sequence of batches whose first pass begins later."""

    def __init__(self, batches: Sequence[Any], start: int) -> None:
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        return (self._batches[index] for index in range(start % max(1, len(self)), len(self)))


def _has_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _can_be_followed(loader: object) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or _has_state(loader):
        return False
    try:
        return len(loader) > 0
    except TypeError:
        return False


def _why_not(loader: object) -> str:
    dataset = getattr(loader, "dataset", loader)
    name = type(dataset).__name__
    if _can_be_followed(loader):
        return (
            f"it does not say where the loader of {name} stood, because there were other loaders then, or a hook had "
            "read from this one. Give the trainer the same loaders, and give hooks loaders of their own"
        )
    what = "reads a stream" if isinstance(dataset, IterableDataset) else "has no length, or no indices,"
    return (
        f"the loader of {name} {what} and has no state. Give the loader state_dict() and load_state_dict(state), as "
        "torchdata's StatefulDataLoader has them"
    )
