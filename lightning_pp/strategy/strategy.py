"""The Lightning strategy."""

from __future__ import annotations

import copy
import gc
import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_pp.checkpoint import read_alone
from lightning_pp.checkpoint.storage.folder import checkpoint_at
from lightning_pp.checkpoint.storage.location import is_folder
from lightning_pp.distributed.sizes import Auto, check_size
from lightning_pp.distributed.watch.this_rank import Position, ThisRank
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import ActivationCheckpointing
from lightning_pp.planning.cuts import CutOptions, names_of
from lightning_pp.planning.pipeline_options import (
    BatchOptions,
    OnNonFinite,
    PipelineOptions,
    UnequalData,
)
from lightning_pp.planning.schedules.given_costs import given_costs
from lightning_pp.planning.schedules.options import DEFAULT_NUM_PROFILED_BATCHES, ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.runtime.compilation import check_compile_options
from lightning_pp.schedule import StageCosts
from lightning_pp.schedule.sharding import ShardingMode
from lightning_pp.sharding import update_as_stage
from lightning_pp.split.data.microbatch import SplitBatch
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.strategy._lightning_private import (
    accumulates,
    leave_samplers_alone,
    optimizers_to_device,
    trainer_of,
    training_loaders_untouched,
)
from lightning_pp.strategy.checkpoints.averaging import average_own_part, leave_averages_to_strategy
from lightning_pp.strategy.checkpoints.checkpoints import Checkpoints
from lightning_pp.strategy.checkpoints.last import LastCheckpoints, find_last_at_urls
from lightning_pp.strategy.checkpoints.rank_part import rank_part
from lightning_pp.strategy.engine import PipelineEngine
from lightning_pp.strategy.faults.ends import (
    end_at_once_when_interrupted_again,
    refuse_code_zero,
    warn_of_nothing_trained,
)
from lightning_pp.strategy.faults.failed_device import end_device_work
from lightning_pp.strategy.faults.failed_run import FailedRuns
from lightning_pp.strategy.faults.preemption import Preemption
from lightning_pp.strategy.faults.signal_deadline import SignalDeadline
from lightning_pp.strategy.faults.tracebacks import stack_of_main_thread
from lightning_pp.strategy.faults.unequal_data import DataProgress, ShortestLoader, check_num_batches
from lightning_pp.strategy.lightning.callbacks import adapt_callbacks
from lightning_pp.strategy.lightning.launcher import RunLauncher
from lightning_pp.strategy.lightning.loggers import GuardedLoggers, warn_of_folders_left_out
from lightning_pp.strategy.lightning.loop import PipelineOptimization
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy
from lightning_pp.strategy.lightning.plain import take_compiled_modules, with_stages
from lightning_pp.strategy.parameters.finetuning import finetune_whole_module, resume_callbacks
from lightning_pp.strategy.parameters.optimizers import (
    KeptOptimizers,
    end_of_updates,
    keep_parameters,
    set_up_one_optimizer,
    training_ones,
    update_as_shards,
)
from lightning_pp.strategy.parameters.precision import agree_on_scale
from lightning_pp.strategy.setup import PipelineSetup, Surroundings
from lightning_pp.strategy.step.data import first_batch, has_no_batches, seed_workers_by
from lightning_pp.strategy.step.refusals import refuse_unsupported

_log = logging.getLogger(__name__)


class PipelineParallelStrategy(MeshStrategy):
    """Trains an unmodified LightningModule as a pipeline, with the loss curve of one device.

    The strategy runs the training step once on fake parameters to cut the module into stages. Every rank then runs
    the same step, with fakes for the parameters of other stages. FSDP2 shards the parameters of a stage over the
    data-parallel ranks. The pipeline's program decides when they are gathered and reduced.

    One stage on one device is plain training: :attr:`is_plain`.

    It is not a ``ModelParallelStrategy``, because Lightning refuses double precision for those.

    Args:
        pipeline_parallel_size: Number of ranks along the pipeline. ``"auto"``: devices / ``data_parallel_size``.
        data_parallel_size: Number of replicas of the pipeline. ``"auto"``: devices / ``pipeline_parallel_size``.
        num_microbatches: Number of slices of each batch along dimension 0. ``"auto"``: 2 to 4 per pipeline rank.
        schedule: Name of a schedule (:func:`lightning_pp.schedule.available_schedules`), a CSV file, or ``"auto"``. A
            CSV file has torch's notation and fixes placement and order, also for fewer microbatches. ``"auto"`` starts
            with costs estimated from FLOPs. After the first batches it searches for an order with measured costs. No
            result depends on the schedule.
        stages_per_rank: Number of stages on each rank. None: what is usual for the schedule; 1 or 2 with ``"auto"``.
        costs: Costs of the stages, or a JSON file of them (``save_costs`` of an earlier run). Nothing is measured then.
            ``held_after_forward`` and ``held_after_input`` are in GiB. If they are 1.0, bytes are estimated.
        save_costs: JSON file to which rank 0 writes measured costs, with any schedule.
        num_profiled_batches: Number of training batches that are measured, after two for warm-up.
        memory_limit_gib: Most GiB that a rank may hold for microbatches between their F and their W, with any schedule.
            It counts what autograd saves and what waiting weight gradients keep. Without it ``"auto"`` holds at most
            what ``zb_h2`` would, two microbatches per pipeline rank.
        device_memory_gib: Most GiB that a rank may hold altogether; cuts and ``"auto"`` keep to it. The dry run
            estimates parameters, gradients, optimizer state, activations, and buffers of messages and gathers. On a
            device, communicators are measured too. Leave room for temporaries of operations, the allocator, CUDA, and
            channels between ranks that are no neighbours.
        search_seconds: With ``"auto"``, wall-clock seconds that rank 0 may search. Hand-made schedules are always
            compared. None: no time limit; the search stops by its own effort.
        whole_batch_loss: Run the code after the last unit once, on the joined outputs of all microbatches. A loss needs
            this if it is not a mean or sum over samples, such as an in-batch contrastive loss. With any schedule, every
            rank then runs all forwards first and holds all microbatches; ``lightning-pp-plan`` shows the cost. By
            default that code runs once for each microbatch.
        check_first_batches: Run a part of the first batches both in one piece and in two, forward only, and compare.
            The first two batches of a fit and the first of validation are checked. A difference in loss, logged values,
            outputs or changed attributes ends the run; the error says where samples are coupled.
        dynamic_step: Rehearse each microbatch before it runs, to find out which units it calls. This costs about 0.1 ms
            per unit call. Set it only if an error asks for it: the called units then depend on what the pipeline cannot
            see, such as a global variable.
        on_nonfinite: Reaction to a NaN or infinite loss, or gradient before an update. ``"error"``: the run ends with a
            :class:`~lightning_pp.errors.NonFiniteError` before anything is updated with it. ``"skip"``: all ranks skip
            the update, with a warning. ``"ignore"``: nothing is checked. ``"error"`` and ``"skip"`` do not save weights
            that are not finite. ``16-mixed`` skips by its scaler.
        unequal_data: Reaction to ranks with different numbers of batches. ``"error"``: the run ends and names both
            numbers. ``"shortest"``: every loader ends on all ranks when the first rank runs out. For data without a
            length the ranks ask each other before each batch.
        units: Names or shell patterns of modules that stay whole on one stage. None: they are found.
        split_points: Names of the units that start stages 1, 2, ...; a block's child cuts the block there. By default
            the cut has the shortest step, by given measured costs, else by FLOPs and parameters. It is inside of blocks
            where that makes the step at least 2 % shorter.
        unit_weights: Factor for the cost of units in the cut, by name or shell pattern.
        rank_speeds: Relative speed of each pipeline rank, if devices differ.
        split_head: Number of parts into which a last ``nn.Linear`` is cut along its classes, for several stages; False,
            or ``"auto"``. Its logits must go into one cross entropy. ``"auto"`` cuts a head that costs more than a
            stage, if the step gets shorter. Every stage with a part holds the whole weight. Steps that use the logits
            otherwise (metrics, prediction) run the whole head on the last stage.
        sharding: What data-parallel ranks share of a stage. ``"replicate"``: nothing; gradients are all-reduced.
            ``"shard_grad_op"``: parameters, gradients and optimizer states are sharded, and parameters gathered once
            per step. ``"full_shard"``: parameters are gathered before each window of use, and freed after it.
        unshard_budget: With ``"full_shard"``, most bytes of gathered parameters on a rank. None: two stages, but at
            most half of what the rank holds and at least its two largest units.
        cpu_offload: Keep parameters, gradients and optimizer states of units on the host, and run the optimizer there.
            It works with one replica, but not with ``"replicate"``.
        data_parallel_replicate_size: Number of data-parallel ranks that hold the same shards (HSDP); a divisor of
            ``data_parallel_size``. Gathers stay within ``data_parallel_size / data_parallel_replicate_size`` ranks.
        compile: True, or options of ``torch.compile``: compile every unit by itself. Where the backward is split, their
            weight gradients wait for W too. Units that are one layer of torch are not compiled.
        activation_checkpointing: Units that keep only their inputs and run again in backward. True: units in lists of
            repeated blocks. Names or patterns: those units. A policy, or a list of operations whose outputs are saved,
            as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes them: repeated blocks.
        save_distributed_checkpoint: True: every rank writes its shard, into a folder that loads under any other layout.
            False: one ``.ckpt`` file, from which a plain ``Trainer()`` on one device resumes.
        async_checkpoint: Write checkpoints while training continues; see :meth:`wait_for_checkpoint`.
        meta_init: Run ``configure_model`` without allocating parameters, as ``trainer.init_module(empty_init=True)``
            does. A rank allocates what it owns and initialises it by ``_init_weights`` or ``reset_parameters``. The
            values differ from those of one device.
        initial_weights: Path or URL of weights to start from: a ``.safetensors`` file, a Hugging Face model directory,
            a checkpoint of any kind, or a saved ``state_dict``. Every rank reads what it owns. The names may lack a
            prefix that all the module's names have.
        process_group_backend: ``"nccl"``, ``"gloo"``, ... None: what suits the device.
        deadlock_seconds: Seconds after which all ranks end with code 1 if each waits for the others in one call. The
            run does not end while a rank runs the user's code. A report shows where each rank stands.
        preemption_seconds: Seconds from a signal within which the next batch must begin, where the run then ends.
            Otherwise all processes end at once with the signal's code (143 for SIGTERM) and save nothing. Raise it for
            long batches.
        timeout: How long a collective or a message may wait. None: ten minutes over NCCL, half an hour over gloo, as in
            torch. The first meeting of all processes may take half an hour.
        flight_recorder_dirpath: Folder for torch's flight recorder, or None. If a collective or message over NCCL times
            out, each rank writes its latest ones there.
        split_batch: Function ``split_batch(batch, n)`` that cuts a batch on the device into at most ``n`` microbatches.
            Give it if cutting along dimension 0 is wrong (graphs, objects). It returns a list of
            :class:`lightning_pp.BatchPart`, or of data whose tensors share one length along dimension 0, the same on
            every rank of a pipeline. In a configuration: ``{_target_: hydra.utils.get_method, path:
            my_module.split_graphs}``.

    Raises:
        ConfigurationError: The product of the sizes is not the number of devices; ``sharding`` is unknown; the budget
            is less than one unit; a number is less than 1; a file is for other sizes; no cut fits
            ``device_memory_gib``; or the module or the trainer needs what a pipeline cannot do.
        ScheduleError: The schedule is unknown or does not allow ``stages_per_rank``; its file cannot be run; or no
            schedule fits the memory limit.
    """

    def __init__(
        self,
        pipeline_parallel_size: int | Auto = "auto",
        data_parallel_size: int | Auto = "auto",
        num_microbatches: int | Auto = "auto",
        *,
        schedule: str | PathLike[str] = "zb_h1",
        stages_per_rank: int | None = None,
        costs: StageCosts | str | PathLike[str] | None = None,
        save_costs: str | PathLike[str] | None = None,
        num_profiled_batches: int = DEFAULT_NUM_PROFILED_BATCHES,
        memory_limit_gib: float | None = None,
        device_memory_gib: float | None = None,
        search_seconds: float | None = None,
        whole_batch_loss: bool = False,
        check_first_batches: bool = True,
        dynamic_step: bool = False,
        on_nonfinite: OnNonFinite = "error",
        unequal_data: UnequalData = "error",
        units: Sequence[str] | str | None = None,
        split_points: Sequence[str] | str | None = None,
        unit_weights: Mapping[str, float] | None = None,
        rank_speeds: Sequence[float] | None = None,
        split_head: bool | int | Literal["auto"] = "auto",
        sharding: ShardingMode = "shard_grad_op",
        unshard_budget: int | None = None,
        cpu_offload: bool = False,
        data_parallel_replicate_size: int = 1,
        compile: bool | Mapping[str, Any] = False,
        activation_checkpointing: ActivationCheckpointing = False,
        save_distributed_checkpoint: bool = True,
        async_checkpoint: bool = False,
        meta_init: bool = False,
        initial_weights: str | Path | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        deadlock_seconds: float = 60.0,
        preemption_seconds: float = 25.0,
        flight_recorder_dirpath: str | Path | None = None,
        split_batch: SplitBatch | None = None,
    ) -> None:
        super().__init__(
            pipeline_parallel_size,
            data_parallel_size,
            process_group_backend,
            timeout,
            data_parallel_replicate_size,
            has_shards_on_host=cpu_offload,
            flight_recorder_dirpath=flight_recorder_dirpath,
            shards_parameters=sharding != "replicate",
        )
        for name, seconds in (("deadlock_seconds", deadlock_seconds), ("preemption_seconds", preemption_seconds)):
            if not seconds > 0:
                raise ConfigurationError(f"{name}={seconds!r} must be a number of seconds above 0.")
        self._deadlock_seconds, self._preemption_seconds = deadlock_seconds, preemption_seconds
        # whether sizes fit the number of devices is checked once that is known
        check_size("pipeline_parallel_size", pipeline_parallel_size)
        source = schedule_source(schedule, stages_per_rank, whole_batch_loss, search_seconds)
        source.check_sizes(pipeline_parallel_size)
        self.options = PipelineOptions(
            ScheduleOptions(source, memory_limit_gib, given_costs(costs), num_profiled_batches, save_costs),
            BatchOptions(num_microbatches, split_batch, check_first_batches, on_nonfinite, unequal_data, dynamic_step),
            CutOptions(names_of(split_points), unit_weights, rank_speeds, names_of(units), split_head),
            ShardingSettings(sharding, unshard_budget, cpu_offload, data_parallel_replicate_size),
            activation_checkpointing,
            device_memory_gib,
        )
        """What is asked of the pipeline, checked."""
        self._compile_options = check_compile_options(compile)
        find_last_at_urls()
        take_compiled_modules()
        self.last_checkpoints = LastCheckpoints()
        """Where ``ckpt_path="last"`` has looked."""
        self._checkpoints = Checkpoints(
            is_sharded=save_distributed_checkpoint,
            in_background=async_checkpoint,
            timeout=timeout,
            is_interrupted=self._may_ranks_be_apart,
        )
        self._meta_init = meta_init
        self._initial_weights = initial_weights
        self._is_plain: bool | None = None
        self._needs_engine = bool(compile or meta_init or async_checkpoint or initial_weights is not None)
        self._engine: PipelineEngine | None = None
        self._setup: PipelineSetup | None = None
        self.runs_no_batch = False
        """Whether the run under way is over no batches (``limit_val_batches=0``), so that there is no pipeline yet."""
        self._num_runs = 0
        self._failed_runs = FailedRuns()
        self._loggers = GuardedLoggers()
        self._data_progress = DataProgress()
        self._num_trained_before = 0
        self._preemption: Preemption | None = None
        self._kept_optimizers = KeptOptimizers()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallelStrategy:
        """A copy, where there is no pipeline.

        Raises:
            ConfigurationError: There is one, and its process groups cannot be copied.
        """
        if self._engine is None:
            copied = memo[id(self)] = type(self).__new__(type(self))
            vars(copied).update(copy.deepcopy(vars(self), memo))
            return copied
        raise ConfigurationError(
            "copy.deepcopy has come to the strategy, through something that holds the Trainer, as progress bars do. A "
            "pipeline and its process groups cannot be copied: copy the module, or each callback that does not hold "
            "the Trainer; Trainer(enable_progress_bar=False) has no progress bar."
        )

    @property
    def engine(self) -> PipelineEngine:
        """What runs the pipeline on this rank; there from ``setup`` on, and never in a plain run."""
        if self.is_plain:
            raise RuntimeError("There is no pipeline: one stage on one device trains as a plain Trainer does.")
        if self._engine is None:
            raise RuntimeError(
                "The pipeline is built in Strategy.setup, before training starts, in a run that has batches; it is not "
                "there yet."
            )
        return self._engine

    @property
    def costs(self) -> StageCosts | None:
        """Costs of the stages on every rank: those given; else those measured, once they are; ``held_*`` in GiB."""
        if self._engine is not None:
            return self._engine.costs
        costs = self.options.schedule.costs
        return None if costs is None else costs.stages

    @property
    def is_plain(self) -> bool:
        """Whether there is one stage on one device, and nothing is asked for that only a pipeline's engine does.

        Then nothing is recorded, cut, checked or refused: steps, optimizers, loops and checkpoints are Lightning's own,
        each batch runs whole, and ``save_distributed_checkpoint`` has no effect, since one process writes one file.
        Pipelines resume from that file, and it from theirs. What needs an engine: ``compile``, ``meta_init``,
        ``initial_weights``, ``async_checkpoint``, ``activation_checkpointing``, ``cpu_offload``, ``device_memory_gib``,
        ``save_costs``, ``split_points``, or several stages. False before the trainer has given devices.
        """
        if self._is_plain is None and self.parallel_devices is not None:
            is_one = self.sizes.pipeline == 1 and self.sizes.data_parallel == 1
            self._is_plain = is_one and not self._needs_engine and self.options.allows_one_stage
        return bool(self._is_plain)

    @property
    def fewest_stages(self) -> int:
        """Stages that the module has to be cut into, at least; known as soon as the trainer has given devices."""
        return self.options.layout_request(self.sizes.pipeline, 1, self.root_device.type).fewest_stages

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning is to give samplers a part of the data, and wait for other ranks."""
        return not self.is_plain

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """What a rank owns, and so what it reads, is known after ``setup``."""
        return not self.is_plain

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The strategy loads optimizer states itself, by parameter name."""
        return self.is_plain

    # ---------------------------------------------------------------- building the pipeline

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self.options.schedule.check_num_ranks(self.sizes.pipeline)
        if not self.is_plain:
            return
        self._launcher = None  # there is nothing to launch
        number = self.options.num_microbatches
        if number not in ("auto", 1):
            rank_zero_info(
                f"num_microbatches={number} has no effect with one stage on one device, where each batch runs whole. "
                f"To save memory, give batches of 1/{number} of the size and set accumulate_grad_batches={number}."
            )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Parameters made within have no memory if ``empty_init``, by default if ``meta_init``."""
        with super().tensor_init_context(self._meta_init if empty_init is None else empty_init):
            yield

    @with_stages
    def setup_environment(self) -> None:
        """Joins the process group; callbacks that would copy the whole module are told not to."""
        super().setup_environment()
        assert self.lightning_module is not None
        self._data_progress.forget()
        self._failed_runs.start(
            ThisRank(
                self.global_rank,
                self.num_ranks,
                place=self._stages,
                position=self._position,
                progress=self._data_progress,
                stack=stack_of_main_thread,
                wake=self._wake,
                exit_codes=self._exit_codes,
                timeout_s=cast(timedelta, self._timeout).total_seconds(),
                deadlock_s=self._deadlock_seconds,
            )
        )
        leave_averages_to_strategy(self.lightning_module.trainer)

    @with_stages
    def setup(self, trainer: pl.Trainer) -> None:
        """Cuts the module, keeps this rank's part of it, and makes optimizers over that part.

        The first batch of the loader that the trainer is about to run over is read to learn how the step flows. Where
        it is to run over nothing, no loader is made, and the module stays whole.
        """
        is_loaded = trainer.ckpt_path is not None or (
            isinstance(self.launcher, RunLauncher) and self.launcher.ckpt_path is not None
        )
        needs_pipeline = self._engine is not None or self._needs_engine or is_loaded
        self.runs_no_batch = not needs_pipeline and has_no_batches(trainer)
        if self.runs_no_batch:
            self._preemption = None
            super().setup(trainer)
        else:
            self._set_up_pipeline(trainer)

    def _set_up_pipeline(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        refuse_unsupported(trainer, module, self.precision_plugin, self.root_device)
        agree_on_scale(self.precision_plugin)
        self._checkpoints.refuse_plugin(self.checkpoint_io)
        self._num_runs += 1
        self._preemption = Preemption(
            trainer,
            self._num_runs,
            num_batches=lambda: self.engine.num_batches_run,
            wait_for_checkpoint=self.wait_for_checkpoint,
            deadline=SignalDeadline(
                self._preemption_seconds, lambda: self.engine.num_batches_run, self._end_without_batch
            ),
        )
        self._prepare_loops(trainer)
        is_new = self._engine is None or self._engine.module is not module
        if is_new:
            self._build(trainer, module)
        engine = self.engine
        engine.attach(trainer)
        self._num_trained_before = engine.num_batches_trained
        adapt_callbacks(trainer, lambda: self.engine.split, self.sizes)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        with engine.split.fake_parameters.all_parameters():
            # optimizers are made as on one device, over all names; what is not owned goes afterwards
            if is_fitting:
                self._reset_optimizers_and_schedulers()
                self.all_or_none(lambda: set_up_one_optimizer(self, trainer))
            # after a fit, validation and test keep its optimizers, which the next checkpoint has
            optimizers = training_ones(self.optimizers) if is_fitting or not is_new else []
            self._kept_optimizers.complete(optimizers, engine.split.fake_parameters)
            part = rank_part(engine.split, self.device_mesh, optimizers)
            self._kept_optimizers.note(optimizers, part.catalog.optimizer_groups)
        keep_parameters(optimizers, list(engine.module.parameters()))
        if is_fitting:
            if self._checkpoints.is_sharded:
                warn_of_folders_left_out(trainer.loggers)
            engine.check_memory(optimizers)
            if not self.options.sharding.cpu_offload:  # states are made where their parameters are
                optimizers_to_device(self.optimizers, self.root_device)
            self.all_or_none(lambda: update_as_shards(self.optimizers))
            if self.sizes.pipeline > 1:
                update_as_stage(training_ones(self.optimizers))
            PipelineOptimization.install(trainer)
        self.setup_precision_plugin()
        engine.gradients.install_clipping(self.precision_plugin, engine.finite.note_norm)
        engine.finite.install(self.precision_plugin)
        self._checkpoints.attach(trainer, engine, part, self.checkpoint_io)
        if is_fitting:
            finetune_whole_module(trainer, self._of_all_parameters)
            average_own_part(trainer, module, self._checkpoints)
        if is_new and self._initial_weights is not None:
            self._checkpoints.load_initial_weights(self._initial_weights)
        self.barrier()

    @contextmanager
    def _of_all_parameters(self) -> Iterator[None]:
        """Within, optimizers may get parameters of any stage; afterwards they have this rank's."""
        engine = self.engine
        with engine.split.fake_parameters.all_parameters():
            optimizers = training_ones(self.optimizers)
            self._kept_optimizers.complete(optimizers, engine.split.fake_parameters)
            yield
            part = rank_part(engine.split, self.device_mesh, optimizers)
            self._kept_optimizers.note(optimizers, part.catalog.optimizer_groups)
        keep_parameters(self.optimizers, list(engine.module.parameters()))
        self._checkpoints.hold(part)

    def _prepare_loops(self, trainer: pl.Trainer) -> None:
        evaluations = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        for loop in (*evaluations, trainer.fit_loop.epoch_loop.val_loop):
            loop.inference_mode = False  # FSDP2's tensors and views of received ones must stay usable
        if self.sizes.data_parallel == 1:
            # with one replica the user's own sampler gives the order that one device would see
            leave_samplers_alone(trainer)

    def _build(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.model = self.precision_plugin.convert_module(module)
        surroundings = Surroundings(
            module,
            self.device_mesh,
            self.data_parallel_mesh,
            self.sizes,
            self.root_device,
            self.precision_plugin,
            self.options,
            self._timeout,
            self._compile_options,
            self.communicators_bytes,
        )
        step = {
            TrainerFn.FITTING: "training_step",
            TrainerFn.VALIDATING: "validation_step",
            TrainerFn.TESTING: "test_step",
            TrainerFn.PREDICTING: "predict_step",
        }[trainer.state.fn]  # type: ignore[index]
        if "_split_by_pipeline" in vars(module):
            raise ConfigurationError(
                f"This {type(module).__name__} was split by another PipelineParallelStrategy, and most of its "
                "parameters are on other ranks. Use the trainer that split it, call gather_module() of its strategy on "
                "every rank, or make a new module and load a checkpoint."
            )
        self._engine = None
        setup = self._setup = PipelineSetup(surroundings, self)
        try:
            first = self.all_or_none(lambda: first_batch(trainer, self.data_parallel_rank))
            with first.as_hooks_left_it():
                model = setup.lay_out(
                    first.batch,
                    step,
                    self._optimizers_beforehand(trainer),
                    has_several_loaders=first.has_several_loaders,
                )
                programs = setup.programs(model)
                self._engine = PipelineEngine(trainer, surroundings, model, programs)
        finally:
            self._setup = None
        vars(module)["_split_by_pipeline"] = True

    @contextmanager
    def _optimizers_beforehand(self, trainer: pl.Trainer) -> Iterator[Optimizer | None]:
        """Within, training has the user's optimizer and schedulers over the whole module, which a step may ask for.

        They are not those that train: ``configure_optimizers`` is called again once the module is cut, and nothing of
        these is left then, for they hold all parameters whole.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            with generators_untouched(self.root_device), training_loaders_untouched(trainer):
                set_up_one_optimizer(self, trainer)
        try:
            yield next(iter(training_ones(self.optimizers)), None)
        finally:
            self._reset_optimizers_and_schedulers()
            gc.collect()  # a scheduler and its optimizer hold each other

    def model_to_device(self) -> None:
        """Moves the module of a plain run; otherwise the engine moves what this rank owns."""
        if self.is_plain:
            assert self.model is not None
            self.model.to(self.root_device)

    # ---------------------------------------------------------------- steps

    @with_stages
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the forward and backward of the whole batch through the pipeline.

        Returns:
            What the user's step would have returned for the whole batch, detached.
        """
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        self._data_progress.begin_batch(trainer)
        is_last = not accumulates(trainer)
        accumulate = trainer.accumulate_grad_batches
        output: STEP_OUTPUT = self.engine.train(args, kwargs, accumulate=accumulate, reduce=is_last)
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
        if self._preemption is not None:
            self._preemption.end_evaluation_if_time()
        self._data_progress.begin_batch(self.lightning_module.trainer)  # type: ignore[union-attr]
        return self.engine.evaluate(step, args, kwargs)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, and notes its fingerprint while it is still on the host."""
        if self._engine is not None:
            self._engine.note_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @with_stages
    def process_dataloader(self, dataloader: object) -> object:
        """Seeds workers by replica; has a training loader go on within an epoch, and may end it where another ends.

        Raises:
            CheckpointError: The training goes on within an epoch, and the loader cannot.
        """
        seed_workers_by(dataloader, self.data_parallel_rank)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        dataloader = self._checkpoints.follow_loader(super().process_dataloader(dataloader), trainer)
        if self.options.batches.unequal_data == "shortest" and self.num_ranks > 1:
            return ShortestLoader(dataloader, self.reduce_boolean_decision)
        return dataloader

    # ---------------------------------------------------------------- checkpoints

    @with_stages
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model, or with ``save_distributed_checkpoint=False`` all of it, on rank 0."""
        return self._checkpoints.model_state()

    @with_stages
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """With ``save_distributed_checkpoint=False`` the optimizer's state as one device would have it, on rank 0."""
        return self._checkpoints.optimizer_state(optimizer)

    @with_stages
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint; every rank takes part. After an exception nothing is written."""
        self._checkpoints.save(checkpoint, filepath, storage_options)

    def wait_for_checkpoint(self) -> None:
        """With ``async_checkpoint``: waits until the last checkpoint is in its place; every rank has to call it.

        The next save, the next load and the end of the run wait by themselves.

        Raises:
            CheckpointError: On all ranks: it could not be written.
        """
        self._checkpoints.wait()

    @with_stages
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, once one that is being written is in its place."""
        self._checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a checkpoint of any layout, sharded or single-file; tensors are read when they are used."""
        weights_only = self.weights_only if weights_only is None else weights_only
        self._checkpoints.wait()
        ranks = None if self.is_plain else self._checkpoints.ranks
        checkpoint_path = self.last_checkpoints.good_one(checkpoint_path, weights_only, ranks)
        if not self.is_plain:
            return self._checkpoints.open(checkpoint_path, weights_only)
        if is_folder(location := checkpoint_at(checkpoint_path)):
            return read_alone(location, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @with_stages
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights and optimizer state, as ``on_load_checkpoint`` has left them, into this rank's part."""
        assert self.lightning_module is not None
        resume_callbacks(self.lightning_module.trainer, checkpoint.get("callbacks", {}))
        self._checkpoints.load(checkpoint, strict=strict)

    @with_stages
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_model_state_dict` has loaded it."""

    # ---------------------------------------------------------------- end

    def gather_module(self) -> None:
        """Makes the module whole again, on the CPU of every rank, after a fit or its siblings: for another Trainer.

        Every rank has to call it. It takes the memory of the whole model on every rank. This trainer's optimizers are
        gone afterwards; to go on with them, save a checkpoint before. In a plain run there is nothing to do.

        Raises:
            RuntimeError: There is no pipeline, it is running, or an exception has ended it, in which case the ranks'
                weights may be one step apart.
            CheckpointError: On all ranks: a save in the background failed.
        """
        if self.is_plain:
            return
        engine = self.engine
        if engine.has_failed:
            raise RuntimeError("An exception has ended the run, and stages may be one step apart: load a checkpoint.")
        if engine.module.trainer.state.status == TrainerStatus.RUNNING:
            raise RuntimeError("gather_module() is for after a run of the trainer, and this one is running.")
        engine.gather_module(self._checkpoints.hand_over())
        self._kept_optimizers.make_whole(training_ones(self.optimizers), engine.module)
        self._engine, self.optimizers = None, []
        del vars(engine.module)["_split_by_pipeline"]

    @with_stages
    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, and lets go of them, so that none waits for this one."""
        end_at_once_when_interrupted_again(exception, self.launcher)
        self._failed_runs.note(exception, self._place())
        refuse_code_zero(exception, self.global_rank)
        if not isinstance(exception, SIGTERMException):
            self._abandon()
        if self._has_device and not isinstance(exception, SIGTERMException):
            end_device_work(self._channels(), exception)
        self._checkpoints.give_up()
        self.last_checkpoints.forget()
        super().on_exception(exception)

    @with_stages
    def teardown(self) -> None:
        """Puts the module's metrics back; its parameters stay where they are, for the next run of the trainer."""
        self.barrier()  # who leaves the run is no longer watched; not after an exception
        if self._preemption is not None:
            self._preemption.end()
            self._preemption = None
        self._failed_runs.end()
        if self._is_interrupted:
            self._loggers.release()  # else the launcher does, when they have been finalized
        if self._engine is not None:
            self._engine.detach()
            end_of_updates(self.optimizers)
            self._tell_of_nothing_trained(self._engine)
        self._checkpoints.close()
        self.last_checkpoints.forget()
        self.checkpoint_io.teardown()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if not (self._is_interrupted and self._has_device):  # it would wait for the device
            self.accelerator.teardown()

    def _end_without_batch(self, number: signal.Signals) -> None:
        """Ends all processes: a signal has come, and no other batch."""
        what = (
            f"got {number.name}, and no other batch began within preemption_seconds={self._preemption_seconds:g}: the "
            "run has ended at once, and nothing was saved"
        )
        self._failed_runs.end_all(what, self._place(), 128 + number)

    @property
    def _has_device(self) -> bool:
        return self.root_device.type != "cpu"

    def _abandon(self) -> None:
        """Ends what other ranks wait for, of the pipeline or of its set-up; from any thread."""
        setup, engine = self._setup, self._engine  # in this order, for a set-up is left when its engine is there
        if engine is not None:
            engine.abandon()
        elif setup is not None:
            setup.connection.abandon()

    def _channels(self) -> list[Any]:
        setup, engine = self._setup, self._engine  # as in _abandon
        if engine is not None:
            return engine.channels
        return [] if setup is None else setup.connection.channels

    def _wake(self) -> None:
        """Another rank has failed, and this one may wait for it: from a thread, ends what it may wait in."""
        self._abandon()
        if self._has_device:
            end_device_work(self._channels())

    def _stages(self) -> str:
        """Where this rank is: ``stage 1 of pipeline 0``; empty before that is known."""
        if self._sizes is None or (self._engine is None and self._setup is None):
            return ""
        stages = ""
        if self._engine is not None:
            numbers = self._engine.placement.stages_of_rank(self.pipeline_rank)
            stages = f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of "
        return f"{stages}pipeline {self.data_parallel_rank}"

    def _place(self) -> str:
        """Where this rank is, and how far it has come."""
        stages = self._stages()
        number = 0 if self._engine is None else self._engine.num_batches_trained
        return stages and f"{stages}, after {number} training batches"

    def _position(self) -> Position:
        """How far this rank has come in all that it does; read from a thread."""
        engine, batch = self._engine, str(self._data_progress)
        if engine is None:
            return Position(batch, "", self._num_collectives)
        return Position(batch, engine.running_action, self._num_collectives + engine.num_batches_run)

    def _before_first_batch(self) -> None:
        assert self.lightning_module is not None
        if isinstance(self.launcher, RunLauncher):  # not with one stage on one device
            self._loggers.guard(self.lightning_module.trainer.loggers, self.global_rank)
            self.launcher.when_done = self._loggers.release
        if not self.is_plain and self.num_ranks > 1:
            check_num_batches(self.lightning_module.trainer)

    def on_train_start(self) -> None:
        """Compares how many batches the ranks have; from here on errors of loggers are warnings."""
        self._before_first_batch()
        if not self.is_plain:
            self._checkpoints.data.begin()

    def on_validation_start(self) -> None:
        """Compares how many batches the ranks have, of each loader; from here on errors of loggers are warnings."""
        self._before_first_batch()

    def on_test_start(self) -> None:
        """Compares how many batches the ranks have, of each loader; from here on errors of loggers are warnings."""
        self._before_first_batch()

    def on_predict_start(self) -> None:
        """Compares how many batches the ranks have, of each loader; from here on errors of loggers are warnings."""
        self._before_first_batch()

    def _exit_codes(self) -> dict[int, int]:
        """Global rank to exit code of processes that this one has started."""
        if not isinstance(self.launcher, RunLauncher):
            return {}
        first = self.node_rank * self.num_processes
        return {first + place: code for place, code in self.launcher.exit_codes().items()}

    def _tell_of_nothing_trained(self, engine: PipelineEngine) -> None:
        trainer = engine.module.trainer
        has_trained = engine.num_batches_trained > self._num_trained_before
        if trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted and not has_trained:
            warn_of_nothing_trained(trainer)

    def _may_ranks_be_apart(self) -> bool:
        """After an exception; after a signal all ranks leave together, between two batches."""
        return self._is_interrupted and not self._is_preempted

    @property
    def _is_preempted(self) -> bool:
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        return trainer is not None and trainer.received_sigterm


__all__ = ["PipelineParallelStrategy"]
