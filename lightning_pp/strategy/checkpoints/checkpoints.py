"""The life of checkpoints in a run: collected by all ranks, written at once or in the background, opened, loaded."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_pp.checkpoint.content import MODEL, OPTIMIZERS
from lightning_pp.checkpoint.ownership.rank_part import with_added_groups
from lightning_pp.checkpoint.ownership.ranks import Ranks, fail_together, from_root
from lightning_pp.checkpoint.storage.folder import TABLE_FILENAME
from lightning_pp.checkpoint.storage.location import is_file, is_folder, is_remote, is_url, locate, naming
from lightning_pp.checkpoint.storage.remote_folder import remove_folder
from lightning_pp.distributed.groups import host_group
from lightning_pp.errors import CheckpointError, ConfigurationError
from lightning_pp.long_tasks import LongTask
from lightning_pp.strategy._lightning_private import NoOptimizer, replace_link
from lightning_pp.strategy.checkpoints.data_position import DataPosition
from lightning_pp.strategy.checkpoints.run_state import own_run_state, restore_run_state

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager

    from lightning_pp.checkpoint.ownership.rank_part import RankPart
    from lightning_pp.checkpoint.reading.opened import OpenedCheckpoint
    from lightning_pp.checkpoint.writing.background import BackgroundSaver
    from lightning_pp.strategy.engine import PipelineEngine

_log = logging.getLogger(__name__)
_ABOUT_FOLDERS = (
    "The checkpoint {path} is a folder, because each rank writes its part. A Trainer with this strategy reads it. "
    "load_from_checkpoint does not: make a file with lightning-pp-export, or set save_distributed_checkpoint=False."
)


class Checkpoints:
    """The strategy's methods about checkpoints that Lightning calls; every rank calls every method.

    In the background, a save copies the rank's tensors to the host and returns; a thread writes them, with collectives
    over a group of its own. The next save, the next load, the end of the run and an exception wait for it, and what it
    replaces is removed only when it is in its place.

    Args:
        is_sharded: Folders; otherwise single files.
        in_background: Write while training goes on.
        timeout: How long a collective of the background may wait.
        is_interrupted: Whether an exception has ended the run. Nothing is collected or written then, since the rank
            that failed cannot count on the others to take part: they may wait for it in the middle of a step.
    """

    def __init__(
        self, *, is_sharded: bool, in_background: bool, timeout: timedelta | None, is_interrupted: Callable[[], bool]
    ) -> None:
        self.is_sharded = is_sharded
        self._in_background = in_background
        self._timeout = timeout
        self._is_interrupted = is_interrupted
        self._run: _Run | None = None
        self._early_data: DataPosition | None = None
        self._background: BackgroundSaver | None = None
        self._stager: DefaultStager | None = None
        self._promised: set[str] = set()
        self._told_of_folders = False
        self._opened: OpenedCheckpoint | None = None

    def refuse_plugin(self, checkpoint_io: CheckpointIO) -> None:
        """Raises :class:`ConfigurationError` for a plugin that a sharded checkpoint would not go through."""
        if type(checkpoint_io) is not TorchCheckpointIO and self.is_sharded:
            raise ConfigurationError(
                f"The plugin {type(checkpoint_io).__name__} writes single files, but every rank writes its part of a "
                "sharded checkpoint without it. Set save_distributed_checkpoint=False to use it. To write sharded "
                "checkpoints while training goes on, set async_checkpoint=True instead."
            )

    def attach(self, trainer: pl.Trainer, engine: PipelineEngine, part: RankPart, checkpoint_io: CheckpointIO) -> None:
        """Takes over the checkpoints of a run of the trainer; the arguments are those of :class:`_Run`."""
        data, self._early_data = self._early_data or DataPosition(trainer), None
        self._run = _Run(engine, part, checkpoint_io, data)
        if self._in_background and self._background is None:
            from lightning_pp.checkpoint.writing.background import BackgroundSaver
            from lightning_pp.checkpoint.writing.sharded import make_stager

            self._background = BackgroundSaver(host_group(self._timeout))
            self._stager = make_stager()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._follow(callback, trainer)

    def hold(self, part: RankPart) -> None:
        """Takes ``part`` in place of the one that the run began with, after an optimizer has got other parameters."""
        self._run = replace(self._attached, part=part)

    @property
    def _attached(self) -> _Run:
        if self._run is None:
            raise ConfigurationError(
                "No pipeline exists now, so no checkpoint can be written or read. It exists from Strategy.setup of a "
                "run with batches until gather_module(). Save in on_fit_start or later. Before the set-up and after "
                "gather_module(), save on rank 0 with torch.save(module.state_dict(), path): every rank has the whole "
                "module."
            )
        return self._run

    @property
    def data(self) -> DataPosition:
        """Where the training data of the run stand."""
        return self._attached.data

    def follow_loader(self, loader: object, trainer: pl.Trainer) -> object:
        """:meth:`DataPosition.follow`, also for a loader that is asked for before the run is attached."""
        if self._run is None:
            self._early_data = self._early_data or DataPosition(trainer)
            return self._early_data.follow(loader)
        return self._run.data.follow(loader)

    @property
    def ranks(self) -> Ranks:
        """All ranks, and where this one stands."""
        return Ranks.from_mesh(self._attached.part.mesh)

    # ---------------------------------------------------------------- saving

    def model_state(self, replaced: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The module's state by name: this rank's part for a sharded checkpoint, else all of it on rank 0.

        Args:
            replaced: Values of this rank that stand in the place of the module's own, such as averaged weights.
        """
        from lightning_pp.checkpoint.writing.single_file import gather_full_state

        if self._is_interrupted():
            return {}
        part = self._attached.part
        own = {**part.local_state_dict(), **(replaced or {})}
        return own if self.is_sharded else gather_full_state(part, own)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one device would have it, on rank 0; nothing for a sharded checkpoint.

        A sharded checkpoint collects the state when it is written, without a copy of it all.
        """
        from lightning_pp.checkpoint.writing.single_file import gather_full_optimizer_state

        if self._is_interrupted() or self.is_sharded or isinstance(optimizer, NoOptimizer):
            return {}
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return gather_full_optimizer_state(with_added_groups(self._attached.part), inner)

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None) -> None:
        """Writes a checkpoint, or begins to.

        Args:
            checkpoint: What the trainer has put together.
            filepath: Where to; rank 0's counts.
            storage_options: For the plugin that writes single files.

        Raises:
            CheckpointError: On all ranks: this save failed, or the one before it in the background.
        """
        from lightning_pp.checkpoint.writing.sharded import prepare_save

        if self._is_interrupted():
            _log.warning(
                f"No checkpoint is written to {filepath}: this rank failed in the middle of a step, and other stages "
                "may not be there to write their parts. Resume from the last checkpoint saved between steps."
            )
            return
        run = self._attached
        path = from_root(str(filepath), Ranks.from_mesh(run.part.mesh))
        checkpoint = dict(checkpoint)
        checkpoint |= own_run_state(checkpoint, run.engine, run.data)
        write: Callable[[dist.ProcessGroup | None], None]
        if self.is_sharded:
            if storage_options is not None:
                raise TypeError(
                    "storage_options apply to single files. Set save_distributed_checkpoint=False to use them."
                )
            if not self._told_of_folders:
                rank_zero_info(_ABOUT_FOLDERS.format(path=path))
            self._told_of_folders = True
            self.wait()  # its copies on the host are about to be overwritten
            write = prepare_save(path, with_added_groups(run.part), checkpoint, self._stager).write
        else:
            if self._background is not None and run.is_root:
                gathered = (MODEL, OPTIMIZERS)  # copies already
                trainer_state = {key: value for key, value in checkpoint.items() if key not in gathered}
                checkpoint = {**checkpoint, **copy.deepcopy(trainer_state)}
            write = partial(self._write_file, checkpoint, path, storage_options)
        if self._background is None:
            write(None)
        else:
            self._background.save(write)
            self._promised = {_key(path)}

    def remove(self, filepath: str | Path) -> None:
        """Removes a checkpoint, once a save under way is in its place. After an exception nothing is removed.

        Raises:
            CheckpointError: On all ranks: it cannot be removed; with a save in the background, when that is waited for.
        """
        self._then(partial(self._remove, str(filepath)))

    def wait(self) -> None:
        """Waits until a save in the background is in its place.

        Raises:
            CheckpointError: On all ranks: it failed.
        """
        if self._background is not None:
            self._background.wait()

    def give_up(self) -> None:
        """After an exception: lets a save in the background finish; that it failed is logged, not raised."""
        try:
            if self._background is not None:
                self._background.wait_alone()
        except Exception as error:
            _log.error(f"The run failed while a checkpoint was being written, and this checkpoint is lost: {error}")

    def _write_file(
        self, checkpoint: dict[str, Any], path: str, storage_options: Any, group: dist.ProcessGroup | None
    ) -> None:
        from lightning_pp.checkpoint.writing.single_file import make_room_for_file

        with fail_together(group):
            if self._attached.is_root:
                location = locate(path)
                make_room_for_file(location)
                with naming(location, "written"):
                    self._attached.checkpoint_io.save_checkpoint(
                        checkpoint, str(location) if is_remote(location) else location, storage_options=storage_options
                    )

    def _remove(self, path: str) -> None:
        location = locate(path)
        if not is_remote(location):
            self._attached.checkpoint_io.remove_checkpoint(location)
        elif is_folder(location):
            remove_folder(location)
        else:
            with naming(location, "removed"):
                self._attached.checkpoint_io.remove_checkpoint(str(location))

    def _then(self, action: Callable[[], None]) -> None:
        """Does something on the root when the save under way is in its place; every rank calls it."""
        if self._is_interrupted():
            return  # nothing has been saved
        if self._background is not None and self._background.is_under_way:
            if self._attached.is_root:
                self._background.then(action)
            return
        with fail_together():
            if self._attached.is_root:
                action()

    def _follow(self, callback: ModelCheckpoint, trainer: pl.Trainer) -> None:
        """Makes links only when their target is complete, and reserves names for saves."""

        def link(_: pl.Trainer, filepath: str, linkpath: str) -> None:
            if _key(filepath) != _key(linkpath):
                self._then(partial(_link, filepath, linkpath))
            self._promised.add(_key(linkpath))
            trainer.strategy.barrier()

        def exists(filepath: str, _: pl.Trainer, original: Any = callback.file_exists) -> bool:
            if _key(filepath) in self._promised:
                return True
            if not is_url(str(filepath)):
                return bool(original(filepath, trainer))
            if self._is_interrupted():
                return False  # nothing is written
            box = [False]
            with fail_together():
                if self._attached.is_root:
                    place = locate(filepath)  # what is left of a save that was interrupted is nothing
                    box = [is_file(place / TABLE_FILENAME) if is_folder(place) else is_file(place)]
            return bool(trainer.strategy.broadcast(box[0]))

        if "file_exists" not in vars(callback):
            replace_link(callback, link)
            vars(callback)["file_exists"] = exists

    # ---------------------------------------------------------------- loading

    def open(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Opens a checkpoint of any layout; hooks may edit what it returns before :meth:`load`.

        Args:
            path: The checkpoint; rank 0's counts.
            weights_only: As in ``torch.load``; None is True.

        Raises:
            CheckpointError: On all ranks: it is missing, damaged, or holds what ``weights_only`` forbids.
        """
        from lightning_pp.checkpoint.reading.open import open_checkpoint

        self.wait()
        with LongTask(f"Opening the checkpoint {path}", rank_zero_info):
            self._opened = open_checkpoint(path, self._attached.part.mesh, weights_only=weights_only)
        return dict(self._opened.content)

    def load(self, content: Mapping[str, Any], *, strict: bool) -> None:
        """Loads the opened checkpoint, as edited by hooks, into model, optimizers and generators.

        Raises:
            CheckpointError: On all ranks: it does not fit.
        """
        if self._opened is None:
            raise CheckpointError("There is no opened checkpoint to load. Pass ckpt_path to the trainer.")
        with LongTask("Loading the checkpoint", rank_zero_info):
            self._opened.load(with_added_groups(self._attached.part), content, strict=strict)
        restore_run_state(content, self._attached.engine, self._attached.data)

    def load_current_model(self, content: Mapping[str, Any]) -> None:
        """Puts named weights of the opened checkpoint into the module, without asking whether any are missing."""
        from lightning_pp.checkpoint.reading.opened import load_state

        load_state(content, self._attached.part, None if self._opened is None else self._opened.reader)

    def load_initial_weights(self, path: str | Path) -> None:
        """Reads weights of any kind of file into this rank's part.

        Raises:
            CheckpointError: On all ranks: they are missing or damaged, or do not fit.
        """
        from lightning_pp.checkpoint.reading.initial_weights import load_weights

        run = self._attached
        with LongTask(f"Loading the weights of {path}", rank_zero_info):
            load_weights(path, run.part, strict=run.engine.module.strict_loading)

    def hand_over(self) -> RankPart:
        """What this rank holds, for the module to be made whole: nothing can be saved or loaded any more.

        Raises:
            CheckpointError: On all ranks: a save in the background failed.
        """
        self.close()
        part, self._run = self._attached.part, None
        return part

    def close(self) -> None:
        """At the end of a run: waits for a save in the background, and closes the opened checkpoint.

        Raises:
            CheckpointError: On all ranks: the save failed.
        """
        self._opened = None
        self.wait()


@dataclass(frozen=True)
class _Run:
    """The parts of the checkpoints of one run of the trainer.

    Attributes:
        engine: Runs the pipeline.
        part: What this rank holds.
        checkpoint_io: Writes, reads and removes single files.
        data: Where the training data stand.
    """

    engine: PipelineEngine
    part: RankPart
    checkpoint_io: CheckpointIO
    data: DataPosition

    @property
    def is_root(self) -> bool:
        return dist.get_rank() == 0


def _key(path: str | Path) -> str:
    """One name for each place."""
    return str(path) if is_url(str(path)) else os.path.abspath(path)


def _link(filepath: str, linkpath: str) -> None:
    """Points a link at a checkpoint in one step, so that a job killed meanwhile leaves the old link or the new."""
    target, link = os.path.relpath(filepath, os.path.dirname(linkpath)), Path(linkpath)
    fresh = link.with_name(f".{link.name}.link")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
    except OSError:  # no permission for links on Windows: Lightning copies as well
        copy_tree = shutil.copytree if os.path.isdir(filepath) else shutil.copy
        copy_tree(filepath, fresh)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    fresh.replace(link)
