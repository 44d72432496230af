"""Lightning's logger for Weights & Biases, extended for several nodes and checkpoint folders."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_pp.callbacks._lightning_private import artifact_name, init_arguments
from lightning_pp.errors import ConfigurationError


class PipelineWandbLogger(WandbLogger):
    """A ``WandbLogger`` for checkpoint folders as artifacts, and for system metrics of all nodes.

    Other arguments go to ``lightning.pytorch.loggers.WandbLogger`` and from there to ``wandb.init``: ``name``,
    ``project``, ``group``, ``job_type``, ``tags``, ``id`` (or ``version``), ``resume``, ...

    Args:
        save_dir: Folder for wandb's own folder.
        offline: Whether to keep the run and its artifacts on this machine until ``wandb sync``.
        log_model: Checkpoints as artifacts: True at the end of a fit, ``"all"`` when each is written. A file or
            folder is ``model.ckpt`` in its artifact. Checkpoints at URLs are always references.
        log_model_as: ``"files"`` stores a copy in wandb, ``"reference"`` only the location.
        every_node: Whether to record system metrics of all nodes, not only of rank 0's. The run must be online,
            because W&B's server joins the processes (mode "shared"). :class:`PipelineMonitor` starts them.
        kwargs: Arguments of ``WandbLogger`` and of ``wandb.init``.

    Raises:
        ConfigurationError: A value is not allowed, or ``every_node`` is set for an offline run.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = ".",
        offline: bool = False,
        log_model: bool | Literal["all"] = False,
        log_model_as: Literal["files", "reference"] = "files",
        every_node: bool = False,
        **kwargs: Any,
    ) -> None:
        if log_model not in (False, True, "all"):
            raise ConfigurationError(f"log_model={log_model!r} must be True, False or 'all'.")
        if log_model_as not in ("files", "reference"):
            raise ConfigurationError(f"log_model_as={log_model_as!r} must be 'files' or 'reference'.")
        if every_node and offline:
            raise ConfigurationError(
                "every_node=True needs offline=False: W&B's server joins the processes of one run."
            )
        super().__init__(save_dir=os.fspath(save_dir), **kwargs)
        self.log_model = log_model
        self.log_model_as = log_model_as
        self.every_node = every_node
        self._logged: dict[str, float] = {}
        self._to_log: list[ModelCheckpoint] = []
        self._of_this_node: Any = None
        self._given_settings: Any = None
        arguments = init_arguments(self)
        if arguments.get("anonymous") is None:
            arguments.pop("anonymous", None)  # wandb warns of it even if it is None
        if offline:  # not in the environment, where the next run of the process would find it
            arguments["mode"] = "offline"
        if every_node:
            self._given_settings = arguments.get("settings")
            arguments["settings"] = self.settings_of_node(0)

    # ---------------------------------------------------------------- nodes

    def watch_this_node(self, trainer: pl.Trainer) -> None:
        """With ``every_node``, the first process of each node but rank 0's joins the run; every rank must call this.

        If it cannot, a warning says so.
        """
        if not self.every_node or trainer.num_nodes == 1:
            return
        run = self.experiment if trainer.is_global_zero else None
        identity = ("", "", None) if run is None else (run.id, run.project, run.entity or None)
        run_id, project, entity = trainer.strategy.broadcast(identity)
        if trainer.node_rank == 0 or trainer.local_rank != 0 or self._of_this_node is not None:
            return
        import wandb

        settings = self.settings_of_node(trainer.node_rank)
        try:
            self._of_this_node = wandb.init(
                id=run_id, project=project, entity=entity, dir=self.save_dir, settings=settings
            )
        except Exception as error:
            warnings.warn(
                f"The system metrics of node {trainer.node_rank} are not in the W&B run: {error}", stacklevel=2
            )

    def settings_of_node(self, node: int) -> Any:
        """The ``wandb.Settings`` of the first process of a node, for the shared run."""
        import wandb

        own = {"mode": "shared", "x_label": f"node_{node}", "x_primary": node == 0}
        if node:
            own["x_update_finish_state"] = False  # the run ends when rank 0 does
        return wandb.Settings(**{**own, **dict(self._given_settings or {})})

    # ---------------------------------------------------------------- checkpoints

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Makes an artifact of a checkpoint, or remembers it for the end of the fit."""
        if self.log_model == "all":
            self._log_checkpoints(checkpoint_callback)
        if self.log_model and not any(known is checkpoint_callback for known in self._to_log):
            self._to_log.append(checkpoint_callback)  # one that is written in the background is complete later

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Makes artifacts of the remaining checkpoints after a successful run."""
        super().finalize(status)
        if status == "success":
            for callback in self._to_log:
                self._log_checkpoints(callback)

    def leave_node(self) -> None:
        """Leaves the run that :meth:`watch_this_node` has joined in this process."""
        if self._of_this_node is not None:
            self._of_this_node.finish()
            self._of_this_node = None

    def _log_checkpoints(self, callback: ModelCheckpoint) -> None:
        for path, aliases in _checkpoints_of(callback).items():
            changed = _time_of(path)
            if changed is not None and self._logged.get(path) != changed:
                self._log_checkpoint(path, aliases, callback)
                self._logged[path] = changed

    def _log_checkpoint(self, path: str, aliases: list[str], callback: ModelCheckpoint) -> None:
        import wandb

        score = callback.best_k_models.get(path, callback.current_score)
        artifact = wandb.Artifact(
            name=artifact_name(self) or f"model-{self.experiment.id}",
            type="model",
            metadata={
                "score": None if score is None else float(score),
                "monitor": callback.monitor,
                "original_filename": path.rstrip("/").rpartition("/")[2],
            },
        )
        if _is_url(path):
            artifact.add_reference(path, name="model.ckpt", checksum=False)
        elif self.log_model_as == "reference":
            artifact.add_reference(Path(path).absolute().as_uri(), name="model.ckpt", checksum=False)
        elif Path(path).is_dir():
            artifact.add_dir(path, name="model.ckpt", policy=self.add_file_policy)
        else:
            artifact.add_file(path, name="model.ckpt", policy=self.add_file_policy)
        self.experiment.log_artifact(artifact, aliases=aliases)


def _checkpoints_of(callback: ModelCheckpoint) -> dict[str, list[str]]:
    """Paths of a callback's checkpoints, with links resolved, each with its aliases."""
    found: dict[str, list[str]] = {}
    kept = callback.best_k_models or [callback.best_model_path]
    newest = callback.last_model_path or max(filter(None, kept), key=lambda path: _time_of(path) or 0.0, default="")
    for path in [*callback.best_k_models, callback.best_model_path, newest]:
        if path:
            found.setdefault(path if _is_url(path) else os.path.realpath(path), [])
    for path, alias in ((callback.best_model_path, "best"), (newest, "latest")):
        if path:
            found[path if _is_url(path) else os.path.realpath(path)].append(alias)
    return dict(sorted(found.items(), key=lambda item: "latest" in item[1]))


def _time_of(path: str) -> float | None:
    """Time of writing in seconds; 0 at a URL, None if there is no checkpoint."""
    if _is_url(path):
        return 0.0
    return Path(path).stat().st_mtime if Path(path).exists() else None


def _is_url(path: str) -> bool:
    return "://" in path
