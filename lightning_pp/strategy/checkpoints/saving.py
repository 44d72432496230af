"""The life of checkpoints in a run: collected by all ranks, written at once or in the background, opened, loaded."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pp.checkpoint import BackgroundSaver, OpenedCheckpoint, make_stager
from lightning_pp.checkpoint.ownership.ranks import fail_together
from lightning_pp.errors import CheckpointError, ConfigurationError
from lightning_pp.strategy.checkpoints.run_state import own_run_state, restore_run_state
from lightning_pp.strategy.checkpoints.state import PipelineState

if TYPE_CHECKING:
    from lightning_pp.strategy.engine import PipelineEngine

_log = logging.getLogger(__name__)


class Checkpoints:
    """Saves and loads; every rank calls every method.

    In the background, a save copies the rank's tensors to the host and returns; a thread writes them, with collectives
    over a group of its own. The next save, the next load, the end of the run and an exception wait for it, and what it
    replaces is removed only when it is in its place.

    Args:
        checkpoint_io: Writes, reads and removes single files.
        is_sharded: Folders; otherwise single files.
        in_background: Write while training goes on.
        timeout: How long a collective of the background may wait.
    """

    def __init__(
        self, checkpoint_io: CheckpointIO, *, is_sharded: bool, in_background: bool, timeout: timedelta | None
    ) -> None:
        self._io = checkpoint_io
        self._is_sharded = is_sharded
        self._is_root = dist.get_rank() == 0
        self._background: BackgroundSaver | None = None
        if in_background:
            self._background = BackgroundSaver(dist.new_group(backend="gloo", timeout=timeout))
            self._stager = make_stager()
        self._promised: set[str] = set()
        self._state: PipelineState | None = None
        self._engine: PipelineEngine | None = None
        self._opened: OpenedCheckpoint | None = None

    def attach(self, trainer: pl.Trainer, state: PipelineState, engine: PipelineEngine) -> None:
        """Takes over the checkpoints of a run of the trainer."""
        self._state, self._engine = state, engine
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._follow(callback, trainer)

    @property
    def state(self) -> PipelineState:
        """What a checkpoint holds."""
        if self._state is None:
            raise RuntimeError("Checkpoints can be written and read from Strategy.setup on.")
        return self._state

    # ---------------------------------------------------------------- saving

    def save(self, checkpoint: dict[str, Any], path: Path, storage_options: Any | None) -> None:
        """Writes a checkpoint, or begins to.

        Raises:
            CheckpointError: On all ranks: this save failed, or the one before it in the background.
        """
        assert self._engine is not None
        checkpoint = {**checkpoint, **own_run_state(checkpoint, self._engine)}
        write: Callable[[dist.ProcessGroup | None], None]
        if self._is_sharded:
            if storage_options is not None:
                raise TypeError(
                    "storage_options apply to single files; set save_distributed_checkpoint=False to use them."
                )
            self.wait()  # its copies on the host are about to be overwritten
            stager = None if self._background is None else self._stager
            write = self.state.prepare_save(checkpoint, path, stager).write
        else:
            if self._background is not None and self._is_root:
                gathered = ("state_dict", "optimizer_states")  # copies already
                rest = {key: value for key, value in checkpoint.items() if key not in gathered}
                checkpoint = {**checkpoint, **copy.deepcopy(rest)}
            write = partial(self._write_file, checkpoint, path, storage_options)
        if self._background is None:
            write(None)
        else:
            self._background.save(write)
            self._promised = {os.path.abspath(path)}

    def remove(self, path: Path) -> None:
        """Removes a checkpoint, once a save under way is in its place."""
        if self._is_root:
            self._then(partial(self._io.remove_checkpoint, path))

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
            self.wait()
        except Exception as error:
            _log.error(f"The checkpoint that was being written when the run failed is lost: {error}")

    def _write_file(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any, group: dist.ProcessGroup | None
    ) -> None:
        with fail_together(group):
            if self._is_root:
                self.state.make_room_for_file(path)
                self._io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _then(self, action: Callable[[], None]) -> None:
        if self._background is None:
            action()
        else:
            self._background.then(action)

    def _follow(self, callback: ModelCheckpoint, trainer: pl.Trainer) -> None:
        """Has links made when what they point to is in its place, and names not taken that are promised to a save."""

        def link(_: pl.Trainer, filepath: str, linkpath: str) -> None:
            if self._is_root and os.path.abspath(filepath) != os.path.abspath(linkpath):
                self._then(partial(_link, filepath, linkpath))
            self._promised.add(os.path.abspath(linkpath))
            trainer.strategy.barrier()

        def exists(filepath: str, _: pl.Trainer, original: Any = callback.file_exists) -> bool:
            return os.path.abspath(filepath) in self._promised or bool(original(filepath, trainer))

        if "file_exists" not in vars(callback):
            vars(callback).update(_link_checkpoint=link, file_exists=exists)

    # ---------------------------------------------------------------- loading

    def open(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Opens a checkpoint of any layout; hooks may edit what it returns before :meth:`load`.

        Raises:
            CheckpointError: On all ranks: it is missing, damaged, or holds what ``weights_only`` forbids.
        """
        self.wait()
        self._opened = self.state.open(path, _weights_only_of_run() if weights_only is None else weights_only)
        return dict(self._opened.content)

    def load(self, content: Mapping[str, Any], *, strict: bool) -> None:
        """Loads what was opened, as hooks have left it, into model, optimizers and generators.

        Raises:
            CheckpointError: On all ranks: it does not fit.
        """
        assert self._engine is not None
        if self._opened is None:
            raise CheckpointError("There is no opened checkpoint to load; pass ckpt_path to the trainer.")
        self.state.load(self._opened, content, strict=strict)
        restore_run_state(content, self._engine)

    def load_current_model(self, content: Mapping[str, Any]) -> None:
        """Puts named weights of the opened checkpoint into the module."""
        self.state.load_weights(self._opened, content)

    def close(self) -> None:
        """At the end of a run: waits for a save in the background, and lets go of what was opened.

        Raises:
            CheckpointError: On all ranks: the save failed.
        """
        self._opened = None
        self.wait()


def refuse_plugin(checkpoint_io: CheckpointIO | None, *, is_sharded: bool) -> None:
    """Raises :class:`ConfigurationError` for a plugin that a sharded checkpoint would not go through."""
    # Lightning puts its default in the place of none when it is first asked for
    if checkpoint_io is not None and type(checkpoint_io) is not TorchCheckpointIO and is_sharded:
        raise ConfigurationError(
            f"The plugin {type(checkpoint_io).__name__} writes single files, and sharded checkpoints are written by "
            "every rank without it. Set save_distributed_checkpoint=False to use it; to write sharded checkpoints "
            "while training goes on, set async_checkpoint=True instead."
        )


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


def _weights_only_of_run() -> bool | None:
    """What the user passed as ``weights_only`` to ``fit`` or its siblings.

    Lightning 2.6 passes it on to strategies that restore before setup only, so it is read where Lightning has it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is pl.Trainer._run.__code__:
            weights_only: bool | None = frame.f_locals.get("weights_only")
            return weights_only
        frame = frame.f_back
    return None
