"""The Lightning strategy: passes Lightning's calls on to the rooms that implement them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_pp.checkpoint.storage.folder import checkpoint_at
from lightning_pp.checkpoint.storage.location import is_folder
from lightning_pp.collector import collector_paused
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.tuning import LayoutRequest
from lightning_pp.schedule import StageCosts
from lightning_pp.strategy._lightning_private import accumulates, allow_compiled_modules, replace_search_for_last
from lightning_pp.strategy.checkpoints.averaging import leave_averages_to_strategy
from lightning_pp.strategy.checkpoints.checkpoints import Checkpoints
from lightning_pp.strategy.checkpoints.last import good_one, last_at_url
from lightning_pp.strategy.faults.run_watch import RunWatch
from lightning_pp.strategy.faults.unequal_data import ShortestLoader
from lightning_pp.strategy.lightning.launcher import RunLauncher
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy
from lightning_pp.strategy.options import RunOptions, StrategyOptions
from lightning_pp.strategy.parameters.finetuning import resume_callbacks
from lightning_pp.strategy.parameters.precision import agree_on_scale
from lightning_pp.strategy.pipeline import HeldPipeline
from lightning_pp.strategy.step.data import has_no_batches, seed_workers_by
from lightning_pp.strategy.step.refusals import refuse_unsupported

if TYPE_CHECKING:
    from lightning_pp.strategy.engine import PipelineEngine


_Method = TypeVar("_Method", bound=Callable[..., Any])


def with_stages(method: _Method) -> _Method:
    """Decorates a method of the strategy that needs stages: in a plain run (``is_plain``) it calls Lightning's method.

    Lightning's method is the one that :class:`MeshStrategy` overrides or inherits.
    """

    @functools.wraps(method)
    def of_plain_or_piped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_plain:
            return getattr(super(MeshStrategy, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(_Method, of_plain_or_piped)


class PipelineParallelStrategy(StrategyOptions):  # noqa: D101 - the docstring stands with the options
    __doc__ = StrategyOptions.__doc__

    def _begin(self, options: PipelineOptions, run_options: RunOptions) -> None:
        super()._begin(options, run_options)
        self.options.schedule.source.check_sizes(self._asked_sizes[0])
        replace_search_for_last(last_at_url)
        allow_compiled_modules(lambda strategy: isinstance(strategy, MeshStrategy) and strategy.is_plain)
        self.last_checkpoints: set[str] = set()
        """The folders searched for ``ckpt_path="last"``, until a checkpoint is loaded."""
        self.runs_no_batch = False
        """Whether the current run has no batches (``limit_val_batches=0``), so that there is no pipeline yet."""
        self._checkpoints = Checkpoints(
            is_sharded=self.run_options.save_distributed_checkpoint,
            in_background=self.run_options.async_checkpoint,
            timeout=self.timeout,
            is_interrupted=self._may_ranks_be_apart,
        )
        self._is_plain: bool | None = None
        self._pipeline = HeldPipeline(self, self._checkpoints)
        self._watch = RunWatch(self, self._pipeline)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallelStrategy:
        """Copies a strategy that has no pipeline.

        Raises:
            ConfigurationError: There is a pipeline, and its process groups cannot be copied.
        """
        if self._pipeline.engine is None:
            copied = memo[id(self)] = type(self).__new__(type(self))
            vars(copied).update(copy.deepcopy(vars(self), memo))
            return copied
        raise ConfigurationError(
            "copy.deepcopy tried to copy the strategy, through an object that holds the Trainer, as progress bars do. "
            "A pipeline and its process groups cannot be copied. Copy the module, or each callback that does not hold "
            "the Trainer. Trainer(enable_progress_bar=False) has no progress bar."
        )

    @property
    def engine(self) -> PipelineEngine:
        """Runs the pipeline on this rank; exists from ``setup`` on, never in a plain run."""
        if self.is_plain:
            raise RuntimeError("There is no pipeline: one stage on one device trains as a plain Trainer does.")
        return self._pipeline.built

    @property
    def costs(self) -> StageCosts | None:
        """Costs of the stages on every rank, given or measured; None before; ``held_*`` in GiB."""
        if self._pipeline.engine is not None:
            return self._pipeline.engine.costs
        costs = self.options.schedule.costs
        return None if costs is None else costs.stages

    @property
    def is_plain(self) -> bool:
        """Whether there is one stage on one device, and no option needs the pipeline's engine.

        Then nothing is recorded, cut, checked or refused: steps, optimizers, loops and checkpoints are Lightning's own,
        each batch runs whole, and ``save_distributed_checkpoint`` has no effect. Pipelines resume from such
        checkpoints, and plain runs from those of pipelines. These options need an engine: ``compile``, ``meta_init``,
        ``initial_weights``, ``async_checkpoint``, ``activation_checkpointing``, ``cpu_offload``, ``device_memory_gib``,
        ``save_costs``, ``split_points``, or several stages. False before the trainer has set devices.
        """
        if self._is_plain is None and self.parallel_devices is not None:
            is_one = self.sizes.ranks_of_batch == 1 and self.sizes.data_parallel == 1
            self._is_plain = is_one and not self.run_options.needs_engine and self.options.allows_one_stage
        return bool(self._is_plain)

    @property
    def fewest_stages(self) -> int:
        """Minimum number of stages; known once the trainer has set devices."""
        options = self.options
        return LayoutRequest(options.schedule, self.sizes.pipeline, 1, options.cut, self.root_device.type).fewest_stages

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True in a pipeline: the tensors of a rank are known only after ``setup``."""
        return not self.is_plain

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False in a pipeline: the strategy loads optimizer states itself, by parameter name."""
        return self.is_plain

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self.options.schedule.check_num_ranks(self.sizes.pipeline)
        if not self.is_plain:
            vars(self.launcher)["explain"] = self._pipeline.explain
            return
        self._launcher = None  # there is nothing to launch
        number = self.options.num_microbatches
        if number not in ("auto", 1):
            rank_zero_info(
                f"num_microbatches={number} has no effect with one stage on one device, where each batch runs whole. "
                f"To save memory, use batches of 1/{number} of the size and set accumulate_grad_batches={number}."
            )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Creates parameters without memory if ``empty_init``, by default if ``meta_init``."""
        with super().tensor_init_context(self.run_options.meta_init if empty_init is None else empty_init):
            yield

    @with_stages
    def setup_environment(self) -> None:
        """Joins the process group, and keeps callbacks from copying the whole module."""
        with collector_paused():
            import_module("lightning_pp.strategy.engine")  # while the processes start that this one has launched
        super().setup_environment()
        self._watch.start()
        leave_averages_to_strategy(self._trainer)

    @with_stages
    def setup(self, trainer: pl.Trainer) -> None:
        """Cuts the module, keeps this rank's part of it, and creates optimizers for that part.

        The step is recorded on the first batch of the trainer's loader. If the run has no batches, no loader is
        created, and the module stays whole.
        """
        is_loaded = trainer.ckpt_path is not None or (
            isinstance(self.launcher, RunLauncher) and self.launcher.ckpt_path is not None
        )
        needs_pipeline = self._pipeline.engine is not None or self.run_options.needs_engine or is_loaded
        self.runs_no_batch = not needs_pipeline and has_no_batches(trainer)
        if self.runs_no_batch:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, trainer.lightning_module, self.precision_plugin, self.root_device)
        agree_on_scale(self.precision_plugin)
        self._checkpoints.refuse_plugin(self.checkpoint_io)
        self._watch.watch_signals(trainer)
        self._pipeline.set_up(trainer)
        self.barrier()

    def model_to_device(self) -> None:
        """Moves the module in a plain run; in a pipeline the engine moves this rank's part."""
        if self.is_plain:
            assert self.model is not None
            self.model.to(self.root_device)

    # ---------------------------------------------------------------- steps

    @with_stages
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the forward and backward of the whole batch through the pipeline.

        Returns:
            The output of the user's step for the whole batch, detached.
        """
        trainer = self._trainer
        self._watch.begin_batch(trainer, evaluates=False)
        output: STEP_OUTPUT = self.engine.train(
            args, kwargs, accumulate=trainer.accumulate_grad_batches, reduce=not accumulates(trainer)
        )
        return output

    @with_stages
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs a validation batch through the pipeline."""
        output: STEP_OUTPUT = self._evaluate("validation_step", args, kwargs)
        return output

    @with_stages
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs a test batch through the pipeline."""
        output: STEP_OUTPUT = self._evaluate("test_step", args, kwargs)
        return output

    @with_stages
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a batch through the pipeline and returns its predictions on every rank."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._watch.begin_batch(self._trainer, evaluates=True)
        return self.engine.evaluate(step, args, kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs Lightning's step, clipping and update. With ``post_validation`` the update may not be final yet."""
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self._pipeline.engine is not None:
            self._pipeline.engine.post_validation.end_update()
        return output

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, and takes its fingerprint on the host first."""
        if self._pipeline.engine is not None:
            self._pipeline.engine.note_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @with_stages
    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers by replica, resumes a training loader within an epoch, and applies ``unequal_data``.

        Raises:
            CheckpointError: The training resumes within an epoch, and the loader cannot.
        """
        seed_workers_by(dataloader, self.data_parallel_rank)
        dataloader = self._checkpoints.follow_loader(super().process_dataloader(dataloader), self._trainer)
        if self.options.batches.unequal_data == "shortest" and self.num_ranks > 1:
            return ShortestLoader(dataloader, self.reduce_boolean_decision)
        return dataloader

    # ---------------------------------------------------------------- checkpoints

    @with_stages
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model; with ``save_distributed_checkpoint=False`` the whole model on rank 0."""
        return self._checkpoints.model_state()

    @with_stages
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """With ``save_distributed_checkpoint=False`` the optimizer state of one device, on rank 0."""
        return self._checkpoints.optimizer_state(optimizer)

    @with_stages
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint; every rank must call this. After an exception nothing is written."""
        self._checkpoints.save(checkpoint, filepath, storage_options)

    def wait_for_checkpoint(self) -> None:
        """With ``async_checkpoint``, waits until the last checkpoint is complete; every rank must call this.

        The next save, the next load and the end of the run wait automatically.

        Raises:
            CheckpointError: On all ranks: the checkpoint could not be written.
        """
        self._checkpoints.wait()

    @with_stages
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, after a save in the background is complete."""
        self._checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a checkpoint of any layout, sharded or single-file; tensors are read when they are used."""
        weights_only = self.weights_only if weights_only is None else weights_only
        self._checkpoints.wait()
        ranks = None if self.is_plain else self._checkpoints.ranks
        checkpoint_path = good_one(self.last_checkpoints, checkpoint_path, weights_only, ranks)
        if not self.is_plain:
            return self._checkpoints.open(checkpoint_path, weights_only)
        if is_folder(location := checkpoint_at(checkpoint_path)):
            from lightning_pp.checkpoint.reading.open import read_alone

            return read_alone(location, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @with_stages
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights and optimizer state into this rank's part, with the edits of ``on_load_checkpoint``."""
        resume_callbacks(self._trainer, checkpoint.get("callbacks", {}))
        self._checkpoints.load(checkpoint, strict=strict)

    # ---------------------------------------------------------------- end

    def gather_module(self) -> None:
        """Gathers the whole module on every rank's CPU after a run, for another Trainer; every rank must call this.

        It needs the memory of the whole model on every rank. This trainer's optimizers are lost; to continue with
        them, save a checkpoint before. In a plain run it does nothing.

        Raises:
            RuntimeError: There is no pipeline; it is running; or an exception has ended it, so that the ranks' weights
                may be one step apart.
            CheckpointError: On all ranks: a save in the background failed.
        """
        if self.is_plain:
            return
        self._pipeline.gather_module()

    @with_stages
    def on_exception(self, exception: BaseException) -> None:
        """Reports to the other ranks and abandons the process groups, so that none waits for this rank."""
        self._watch.note(exception)
        self._checkpoints.give_up()
        self.last_checkpoints.clear()
        super().on_exception(exception)

    @with_stages
    def teardown(self) -> None:
        """Restores the module's metrics; its parameters stay on their stages for the trainer's next run."""
        self.barrier()  # who leaves the run is no longer watched; not after an exception
        self._watch.end(is_interrupted=self._is_interrupted)
        self._pipeline.detach()
        self._checkpoints.close()
        self.last_checkpoints.clear()
        self.checkpoint_io.teardown()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if not (self._is_interrupted and self.has_device):  # it would wait for the device
            self.accelerator.teardown()

    def on_train_start(self) -> None:
        """Compares the ranks' numbers of batches; from here on errors of loggers are warnings."""
        self._watch.before_first_batch(self._trainer)
        if not self.is_plain:
            self._checkpoints.data.begin()

    def on_validation_start(self) -> None:
        """Compares the ranks' numbers of batches of each loader; from here on errors of loggers are warnings."""
        self._watch.before_first_batch(self._trainer)

    on_test_start = on_predict_start = on_validation_start

    @property
    def has_device(self) -> bool:
        """Whether this rank computes on an accelerator."""
        return self.root_device.type != "cpu"

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _may_ranks_be_apart(self) -> bool:
        """Whether ranks may be at different steps: after an exception, but not after a signal."""
        return self._is_interrupted and not self._trainer.received_sigterm
