"""The options of the strategy: documented here alone, checked as soon as they are given, and handed on in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_pp.distributed.sizes import Auto
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import ActivationCheckpointing
from lightning_pp.planning.cuts import CutOptions, names_of
from lightning_pp.planning.pipeline_options import BatchOptions, OnNonFinite, PipelineOptions, UnequalData
from lightning_pp.planning.schedules.given_costs import given_costs
from lightning_pp.planning.schedules.options import DEFAULT_NUM_PROFILED_BATCHES, ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.runtime.compilation import check_compile_options
from lightning_pp.schedule import StageCosts
from lightning_pp.schedule.sharding import ShardingMode
from lightning_pp.split.data.microbatch import SplitBatch
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy


class CheckpointOptions(NamedTuple):
    """The strategy's arguments that concern checkpoints.

    Attributes:
        is_sharded: Whether they are folders.
        in_background: Whether they are written while training goes on.
        initial_weights: What to start from.
    """

    is_sharded: bool
    in_background: bool
    initial_weights: str | Path | None


@dataclass(frozen=True)
class RunOptions:
    """The strategy's arguments that concern a run, and not the plan of its pipeline.

    Attributes:
        compile: True, or options of ``torch.compile``.
        meta_init: Whether parameters are made without memory.
        checkpoints: What is said of checkpoints.
        deadlock_seconds: The run ends if all ranks have waited so long.
        preemption_seconds: How long a batch may take to begin, after a signal.

    Raises:
        ConfigurationError: A value is not of its kind.
    """

    compile: bool | Mapping[str, Any]
    meta_init: bool
    checkpoints: CheckpointOptions
    deadlock_seconds: float
    preemption_seconds: float

    def __post_init__(self) -> None:
        for name in ("deadlock_seconds", "preemption_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be a number of seconds above 0.")
        check_compile_options(self.compile)

    @property
    def compile_options(self) -> dict[str, Any] | None:
        """Keyword arguments for ``torch.compile`` of each unit; None to leave units as they are."""
        return check_compile_options(self.compile)

    @property
    def needs_engine(self) -> bool:
        """Whether something is asked for that a pipeline's engine does with one stage too."""
        _, in_background, initial_weights = self.checkpoints
        return bool(self.compile or self.meta_init or in_background or initial_weights is not None)


class StrategyOptions(MeshStrategy):
    """Trains an unmodified LightningModule as a pipeline, with the loss curve of one device.

    The module is cut into stages by running its step once on fake parameters; every rank then runs the user's own
    step, with fakes for what it does not own. Inside a stage parameters are sharded by FSDP2 over the
    data-parallel ranks, and gathered and reduced when the pipeline's program says so.

    One stage on one device is plain training: :attr:`is_plain`.

    It is not a ``ModelParallelStrategy``, since Lightning refuses double precision to all of those.

    Args:
        pipeline_parallel_size: Ranks along the pipeline; ``"auto"`` = devices / ``data_parallel_size``.
        data_parallel_size: Replicas of the pipeline; ``"auto"`` = devices / ``pipeline_parallel_size``.
        num_microbatches: Slices that each batch is cut into, along dimension 0; ``"auto"``: 2 to 4 per pipeline rank.
        schedule: Name of a schedule (:func:`lightning_pp.schedule.available_schedules`), or the path of a CSV file in
            torch's notation, which says placement and order and is kept to for fewer microbatches too. ``"auto"``:
            placement and first order by costs estimated from the step's FLOPs; after the first batches, an order that
            is searched for with the measured costs. No result depends on it.
        stages_per_rank: Stages on each rank; by default what is usual for the schedule, and with ``"auto"`` 1 or 2.
        costs: Costs of the stages, or a JSON file of them (``save_costs`` of an earlier run): nothing is measured then.
            ``held_after_forward`` and ``held_after_input`` are GiB; left at 1.0, bytes are estimated.
        save_costs: A JSON file that rank 0 writes measured costs to, with any schedule.
        num_profiled_batches: Training batches that are measured, after two that warm up.
        memory_limit_gib: What a rank may hold of microbatches between their F and their W, GiB, for any schedule:
            what autograd keeps, and what weight gradients wait with. Without it ``"auto"`` holds no more than
            ``zb_h2`` would, two microbatches for each rank of the pipeline.
        device_memory_gib: What a rank may hold altogether, GiB, by the estimate of a dry run: parameters, gradients,
            optimizer state, activations, buffers of messages and gathers, and on a device the communicators of
            collectives, which are measured. Cuts and ``"auto"`` keep to it. What operations, the allocator, CUDA and
            channels between stages take is not in it, so leave some of the device out.
        search_seconds: With ``"auto"``, how long rank 0 may try, in seconds of wall time; hand-made schedules are
            always compared. None: as long as the search's own effort takes.
        whole_batch_loss: For a loss that is no mean or sum over samples (an in-batch contrastive loss, a root of a
            mean): the code after the last unit runs once, on the outputs of all microbatches joined. Every rank then
            runs all forwards of a batch before its backwards and holds all microbatches at once, with any schedule;
            ``lightning-pp-plan`` tells what this costs. False: that code runs once for each microbatch.
        check_first_batches: In the first two training batches of a fit, and the first of validation, a part is also run
            in one piece and in two, forward only. If loss, logged values, outputs or changed attributes differ, the run
            ends with an error that says where samples are coupled. False: nothing is compared.
        dynamic_step: Whether each microbatch is rehearsed before it runs, to find out which units it calls. Only needed
            if that depends on what the pipeline cannot see, such as a global variable; the error then says so. The
            price is some 0.1 ms for each unit call.
        on_nonfinite: What happens when a loss, or a gradient before an update, is NaN or infinite. ``"error"``: the run
            ends with a :class:`~lightning_pp.errors.NonFiniteError` that says where, before anything is updated with
            it. ``"skip"``: all ranks skip this update, with a warning. ``"ignore"``: nothing is looked at. With
            ``"error"`` and ``"skip"`` weights that are not finite are not saved. ``16-mixed`` skips by its scaler.
        unequal_data: What happens when ranks have different numbers of batches. ``"error"``: the run ends and tells
            both numbers. ``"shortest"``: every rank stops where the first runs out of data, in each loader; for data
            without a length the ranks ask each other before each batch.
        units: Names or shell patterns of modules that live whole on one stage; by default discovered.
        split_points: Names of the units that start stages 1, 2, ...; by default the cut with the shortest step, by
            measured costs that are given, else by FLOPs and parameters, inside of blocks where that is at least 2 %
            shorter. A name may be that of a block's child: the block is cut there.
        unit_weights: Name or shell pattern of units to a factor for their cost in the cut.
        rank_speeds: For each rank of the pipeline how fast it is compared with the others, where devices differ.
        split_head: Whether a last ``nn.Linear`` whose logits go into one cross entropy is cut along its classes into
            parts that several stages share: the number of parts, False, or ``"auto"``: if it costs more than a stage
            and the step gets shorter by it. Every stage that has a part holds the whole weight. Steps that use the
            logits otherwise (metrics, prediction) call the head whole, on the last stage.
        sharding: What data-parallel ranks share of a stage. ``"replicate"``: nothing, gradients are all-reduced.
            ``"shard_grad_op"``: parameters, gradients and optimizer states are sharded, parameters gathered once per
            step. ``"full_shard"``: parameters are gathered ahead of each window of use, and freed after it.
        unshard_budget: With ``"full_shard"``, the most bytes of gathered parameters on a rank at any time; by default
            two stages, but at most half of what the rank holds and at least its two largest units.
        cpu_offload: Keep parameters, gradients and optimizer states of units on the host between uses, and run the
            optimizer there; with one replica too. Not with ``"replicate"``.
        data_parallel_replicate_size: How many of the data-parallel ranks hold the same shards (HSDP); a divisor of
            ``data_parallel_size``. Gathers stay within ``data_parallel_size / data_parallel_replicate_size`` ranks.
        compile: True, or options of ``torch.compile``: every unit is compiled by itself, and where the backward is
            split its weight gradients wait for W as those of uncompiled units do. Units that are one layer
            of torch run as they are.
        activation_checkpointing: Units that keep their inputs only and run again in backward. True: those that are one
            of a list of repeated blocks. Names or patterns of units: those. A policy, or a list of operations whose
            outputs are saved, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes them: repeated
            blocks, selectively.
        save_distributed_checkpoint: True: every rank writes its shard, into a folder that loads under any other layout.
            False: one plain ``.ckpt`` file that a ``Trainer()`` on one device resumes from.
        async_checkpoint: Write checkpoints while training goes on; see :meth:`wait_for_checkpoint`.
        meta_init: Run ``configure_model`` without memory for parameters, as ``trainer.init_module(empty_init=True)``
            does: a rank allocates what it owns and initialises it by ``_init_weights`` or ``reset_parameters``. The
            values are not those of one device, which draws them one after the other.
        initial_weights: What to start from in place of the module's own values, by path or URL: a ``.safetensors``
            file, a Hugging Face model directory, a checkpoint of any kind, or a ``state_dict``; every rank reads what
            it owns. The names may lack a prefix that all the module's names have.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; by default what suits the device.
        deadlock_seconds: The run ends on all ranks, with code 1 and a report of where each stands, when every rank has
            waited so long in one and the same call for the others, and none runs the user's code.
        preemption_seconds: A signal ends a run at the next batch. If none begins within so many seconds, all processes
            end at once, with the signal's code (143 for SIGTERM), and nothing is saved. Longer for batches that take
            longer.
        timeout: How long a collective or a message may wait, once all processes have met; for that they have half an
            hour. None: ten minutes over NCCL, half an hour over gloo, as torch has it.
        flight_recorder_dirpath: Folder into which each rank writes its latest collectives and messages over NCCL when
            one of them times out, by torch's flight recorder; None: nothing is recorded.
        split_batch: ``split_batch(batch, n)`` cuts a batch, on the device, into at most ``n`` microbatches, where
            cutting along dimension 0 is not right (graphs, objects): a list of :class:`lightning_pp.BatchPart`, or of
            data whose tensors all have one length along dimension 0. The same on every rank of a pipeline. In a
            configuration: ``{_target_: hydra.utils.get_method, path: my_module.split_graphs}``.

    Raises:
        ConfigurationError: The sizes' product is not the number of devices, the sharding is unknown, the budget is less
            than one unit, a number is less than 1, a file is for other sizes, no cut keeps ``device_memory_gib``, or
            the module or the trainer asks for what a pipeline cannot do.
        ScheduleError: The schedule is unknown, does not allow ``stages_per_rank``, its file cannot be run, or nothing
            keeps the memory limit.
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
        shards = ShardingSettings(sharding, unshard_budget, cpu_offload, data_parallel_replicate_size)
        super().__init__(
            pipeline_parallel_size, data_parallel_size, process_group_backend, timeout, shards, flight_recorder_dirpath
        )
        source = schedule_source(schedule, stages_per_rank, whole_batch_loss, search_seconds)
        source.check_sizes(pipeline_parallel_size)
        self.options = PipelineOptions(
            ScheduleOptions(source, memory_limit_gib, given_costs(costs), num_profiled_batches, save_costs),
            BatchOptions(num_microbatches, split_batch, check_first_batches, on_nonfinite, unequal_data, dynamic_step),
            CutOptions(names_of(split_points), unit_weights, rank_speeds, names_of(units), split_head),
            shards,
            activation_checkpointing,
            device_memory_gib,
        )
        checkpoints = CheckpointOptions(save_distributed_checkpoint, async_checkpoint, initial_weights)
        self.run_options = RunOptions(compile, meta_init, checkpoints, deadlock_seconds, preemption_seconds)
        self._begin()

    def _begin(self) -> None:
        """Makes what the strategy consists of, once the options are there."""
