"""The pipeline that a strategy holds: built for a module, taken over by run after run, and taken apart again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding.shard_updates import update_shards
from lightning_pp.sharding.stage_updates import update_as_stage
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.strategy._lightning_private import (
    leave_samplers_alone,
    optimizers_to_device,
    training_loaders_untouched,
)
from lightning_pp.strategy.checkpoints.averaging import average_own_part
from lightning_pp.strategy.checkpoints.checkpoints import Checkpoints
from lightning_pp.strategy.checkpoints.rank_part import make_whole, rank_part
from lightning_pp.strategy.faults.ends import warn_nothing_trained
from lightning_pp.strategy.lightning.callbacks import adapt_callbacks
from lightning_pp.strategy.lightning.loggers import warn_folders_left_out
from lightning_pp.strategy.lightning.loop import PipelineOptimization
from lightning_pp.strategy.options import StrategyOptions
from lightning_pp.strategy.parameters.finetuning import finetune_whole_module
from lightning_pp.strategy.parameters.optimizers import (
    KeptOptimizers,
    keep_parameters,
    set_up_one_optimizer,
    training_ones,
)
from lightning_pp.strategy.parameters.tensor_units import refuse_distributed, refuse_other_updates
from lightning_pp.strategy.step.data import first_batch
from lightning_pp.strategy.step.outside_steps import note_shards, refuse_missing_name
from lightning_pp.strategy.surroundings import Surroundings

if TYPE_CHECKING:
    from lightning_pp.strategy.engine import PipelineEngine
    from lightning_pp.strategy.setup import PipelineSetup

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
_IS_SPLIT = "_split_by_pipeline"  # an attribute of modules


class HeldPipeline:
    """The pipeline of a strategy.

    Args:
        strategy: Whose it is.
        checkpoints: Those of its runs.

    Attributes:
        engine: Runs the pipeline; None until it is built, and once the module is whole again.
    """

    def __init__(self, strategy: StrategyOptions, checkpoints: Checkpoints) -> None:
        self.engine: PipelineEngine | None = None
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._setup: PipelineSetup | None = None
        self._kept_optimizers = KeptOptimizers()
        self._num_trained_before = 0

    @property
    def built(self) -> PipelineEngine:
        """The engine, where there is one.

        Raises:
            RuntimeError: There is none yet.
        """
        if self.engine is None:
            raise RuntimeError(
                "There is no pipeline yet. Strategy.setup builds it before training starts, in a run that has batches."
            )
        return self.engine

    def set_up(self, trainer: pl.Trainer) -> None:
        """For a run of the trainer: cuts its module if that is new, and makes optimizers over this rank's part."""
        strategy, module = self._strategy, trainer.lightning_module
        self._prepare_loops(trainer)
        is_new = self.engine is None or self.engine.module is not module
        if is_new:
            self._build(trainer, module)
        engine = self.built
        engine.attach(trainer)
        self._num_trained_before = engine.num_batches_trained
        adapt_callbacks(trainer, lambda: self.built.split, strategy.sizes)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        with engine.split.fake_parameters.all_parameters():
            # optimizers are made as on one device, over all names; what is not owned goes afterwards
            if is_fitting:
                self._drop_optimizers()
                strategy.all_or_none(lambda: set_up_one_optimizer(strategy, trainer))
            # after a fit, validation and test keep its optimizers, which the next checkpoint has
            optimizers = training_ones(strategy.optimizers) if is_fitting or not is_new else []
            self._kept_optimizers.complete(optimizers, engine.split)
            part = rank_part(engine.split, strategy.device_mesh, optimizers)
            self._kept_optimizers.note(optimizers, part.catalog.optimizer_groups)
        keep_parameters(optimizers, list(engine.module.parameters()))
        if is_fitting:
            self._prepare_fit(trainer, optimizers)
        strategy.setup_precision_plugin()
        engine.gradients.install_clipping(strategy.precision_plugin, engine.post_validation.clip)
        engine.finite.install(strategy.precision_plugin)
        self._checkpoints.attach(trainer, engine, part, strategy.checkpoint_io)
        if is_fitting:
            finetune_whole_module(trainer, self._with_all_parameters)
            average_own_part(trainer, module, self._checkpoints)
        if is_new and (path := strategy.run_options.initial_weights) is not None:
            self._checkpoints.load_initial_weights(path)

    def _prepare_fit(self, trainer: pl.Trainer, optimizers: list[Optimizer]) -> None:
        strategy = self._strategy
        if self._checkpoints.is_sharded:
            warn_folders_left_out(trainer.loggers)
        self.built.check_memory(optimizers)
        if not strategy.options.sharding.cpu_offload:  # states are made where their parameters are
            optimizers_to_device(strategy.optimizers, strategy.root_device)
        cut = self.built.gradients.cut
        for optimizer in optimizers:
            strategy.all_or_none(partial(refuse_other_updates, optimizer, cut))
            update_shards(optimizer)
        strategy.all_or_none(lambda: update_as_stage(optimizers, has_stages=strategy.sizes.pipeline > 1))
        PipelineOptimization.install(trainer)

    @contextmanager
    def _with_all_parameters(self) -> Iterator[None]:
        """In the block, optimizers may get parameters of any stage; afterwards they have only this rank's."""
        engine, strategy = self.built, self._strategy
        with engine.split.fake_parameters.all_parameters():
            optimizers = training_ones(strategy.optimizers)
            self._kept_optimizers.complete(optimizers, engine.split)
            yield
            part = rank_part(engine.split, strategy.device_mesh, optimizers)
            self._kept_optimizers.note(optimizers, part.catalog.optimizer_groups)
        keep_parameters(strategy.optimizers, list(engine.module.parameters()))
        self._checkpoints.hold(part)

    def _prepare_loops(self, trainer: pl.Trainer) -> None:
        evaluations = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in (*evaluations, trainer.fit_loop.epoch_loop.val_loop):
            loop.inference_mode = False  # FSDP2's tensors and views of received ones must stay usable
        if self._strategy.sizes.data_parallel == 1:
            # with one replica the user's own sampler has the order that one device would see
            leave_samplers_alone(trainer)

    def _build(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        from lightning_pp.strategy.engine import PipelineEngine  # here, for they take long to import
        from lightning_pp.strategy.setup import PipelineSetup

        strategy = self._strategy
        strategy.model = strategy.precision_plugin.convert_module(module)
        surroundings = Surroundings(
            module,
            strategy.device_mesh,
            strategy.data_parallel_mesh,
            strategy.sizes,
            strategy.root_device,
            strategy.precision_plugin,
            strategy.options,
            strategy.timeout,
            strategy.run_options.compile_options,
            strategy.communicators_bytes,
        )
        step = _STEPS[trainer.state.fn]  # type: ignore[index]
        if _IS_SPLIT in vars(module):
            raise ConfigurationError(
                f"Another PipelineParallelStrategy split this {type(module).__name__}, and most of its parameters are "
                "on other ranks. Use the trainer that split it, call gather_module() of its strategy on every rank, or "
                "make a new module and load a checkpoint."
            )
        refuse_distributed(module)
        self.engine = None
        setup = self._setup = PipelineSetup(surroundings, strategy)
        try:
            first = strategy.all_or_none(lambda: first_batch(trainer, strategy.data_parallel_rank))
            with first.as_hooks_left_it():
                beforehand = self._optimizers_beforehand(trainer)
                model = setup.lay_out(first.batch, step, beforehand, has_several_loaders=first.has_several_loaders)
                self.engine = PipelineEngine(trainer, surroundings, model)
        finally:
            self._setup = None
        vars(module)[_IS_SPLIT] = True

    @contextmanager
    def _optimizers_beforehand(self, trainer: pl.Trainer) -> Iterator[Optimizer | None]:
        """In the block, training has the user's optimizer and schedulers over the whole module: steps may read them.

        They are not those that train: ``configure_optimizers`` is called again once the module is cut, and nothing of
        these is left then, for they hold all parameters whole.
        """
        strategy, freezes = self._strategy, gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()  # what there is by now is not searched below, which takes .2 s
        try:
            if trainer.state.fn == TrainerFn.FITTING:
                with generators_untouched(strategy.root_device), training_loaders_untouched(trainer):
                    set_up_one_optimizer(strategy, trainer)
            yield next(iter(training_ones(strategy.optimizers)), None)
        finally:
            self._drop_optimizers()
            gc.collect()  # a scheduler and its optimizer hold each other
            if freezes:
                gc.unfreeze()

    def _drop_optimizers(self) -> None:
        self._strategy.optimizers, self._strategy.lr_scheduler_configs = [], []

    def detach(self) -> None:
        """A run of the trainer has ended."""
        if self.engine is None:
            return
        self.engine.detach()
        trainer = self.engine.module.trainer
        has_trained = self.engine.num_batches_trained > self._num_trained_before
        if trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted and not has_trained:
            warn_nothing_trained(trainer)

    def gather_module(self) -> None:
        """Makes the module whole on every rank, and drops the pipeline.

        Raises:
            RuntimeError: It is running, or an exception has ended it.
            CheckpointError: On all ranks: a save in the background failed.
        """
        engine = self.built
        if engine.has_failed:
            raise RuntimeError("An exception ended the run, and stages may be one step apart. Load a checkpoint.")
        if engine.module.trainer.state.status == TrainerStatus.RUNNING:
            raise RuntimeError("gather_module() is for after a run, but this trainer is running.")
        make_whole(self._checkpoints.hand_over(), engine.split, engine.gradients)
        self._kept_optimizers.make_whole(training_ones(self._strategy.optimizers), engine.module)
        self.engine, self._strategy.optimizers = None, []
        del vars(engine.module)[_IS_SPLIT]

    def explain(self, error: KeyError | RuntimeError) -> None:
        """Says more than ``error``, which ends a run, if it is for want of another stage's or of a whole parameter."""
        if isinstance(error, RuntimeError):
            note_shards(error)
        elif self.engine is not None:
            refuse_missing_name(error, self.engine.split.fake_parameters)

    # ---------------------------------------------------------------- from any thread

    def abandon(self) -> None:
        """Ends what other ranks wait for, of the pipeline or of its set-up."""
        setup, engine = self._setup, self.engine  # in this order, for a set-up is left when its engine is there
        if engine is not None:
            engine.abandon()
        elif setup is not None:
            setup.connection.abandon()

    @property
    def channels(self) -> list[Any]:
        """What carries tensors between stages, where they do not go through a group."""
        setup, engine = self._setup, self.engine  # as in abandon
        held = engine or setup
        return [] if held is None else held.connection.channels

    @property
    def stages(self) -> str:
        """Where this rank is: ``stage 1 of pipeline 0``; empty before that is known."""
        setup, engine, strategy = self._setup, self.engine, self._strategy
        stages = ""
        if engine is not None:
            numbers = engine.placement.stages_of_rank(strategy.pipeline_rank)
            stages = f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of "
        elif setup is None:
            return ""
        of_tensor = f", tensor rank {strategy.tensor_parallel_rank}" if strategy.sizes.tensor > 1 else ""
        return f"{stages}pipeline {strategy.data_parallel_rank}{of_tensor}"
