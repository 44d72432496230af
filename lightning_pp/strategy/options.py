"""The options of the strategy: documented here alone, checked at once, and passed on in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from lightning_pp.distributed.sizes import Auto
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import ActivationCheckpointing
from lightning_pp.planning.cuts import CutOptions, names_of
from lightning_pp.planning.pipeline_options import Auxiliary, BatchOptions, OnNonFinite, PipelineOptions, UnequalData
from lightning_pp.planning.schedules.given_costs import given_costs
from lightning_pp.planning.schedules.options import DEFAULT_NUM_PROFILED_BATCHES, ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.runtime.compilation import check_compile_options
from lightning_pp.schedule import StageCosts
from lightning_pp.schedule.sharding import ShardingMode
from lightning_pp.split.data.microbatch import BatchDim, SplitBatch
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy


@dataclass(frozen=True)
class RunOptions:
    """The strategy's arguments for a run, not for the plan of its pipeline; see :class:`StrategyOptions`.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    compile: bool | Mapping[str, Any]
    meta_init: bool
    save_distributed_checkpoint: bool
    async_checkpoint: bool
    initial_weights: str | Path | None
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
        """Whether an option needs the pipeline's engine even with one stage."""
        return bool(self.compile or self.meta_init or self.async_checkpoint or self.initial_weights is not None)


class StrategyOptions(MeshStrategy):
    """Trains an unmodified LightningModule as a pipeline, with the loss curve of one device.

    The strategy runs the training step once on fake parameters to cut the module into stages. Every rank then runs
    the same step, with fakes for the parameters of other stages. FSDP2 shards the parameters of a stage over the
    data-parallel ranks. The pipeline's program decides when they are gathered and reduced.

    One stage on one device is plain training: :attr:`is_plain`.

    It is not a ``ModelParallelStrategy``, because Lightning refuses double precision for those.

    Args:
        pipeline_parallel_size: Number of ranks along the pipeline. ``"auto"``: devices / ``data_parallel_size``.
        data_parallel_size: Number of replicas of the pipeline. ``"auto"``: devices / ``pipeline_parallel_size``.
        tensor_parallel_size: Number of neighbouring ranks that share the matrices of each stage, and its batches. The
            product of the three sizes is the number of devices.
        tensor_parallel_plan: Matrices to cut over the tensor ranks. ``"auto"``: all that the recorded step shows can be
            cut. A dict maps names or patterns of modules to ``"colwise"``, ``"rowwise"``, ``"auto"`` or
            ``"replicate"``. In the first batch each distinct unit also runs whole, and is compared.
        sequence_parallel: Compute norms, dropout and sums between two cut matrices of a unit on parts of the sequence.
            This takes less memory and communicates the same number of bytes.
        num_microbatches: Number of slices of each batch along dimension 0. ``"auto"``: 2 to 4 per pipeline rank.
        schedule: Name of a schedule (:func:`lightning_pp.schedule.available_schedules`), a CSV file, or ``"auto"``. A
            CSV file in torch's notation fixes placement and order, also for fewer microbatches. ``"auto"`` chooses
            placement and a first order by costs estimated from FLOPs. After the first batches it searches for an order
            with measured costs. Results do not depend on the schedule.
        stages_per_rank: Number of stages on each rank. None: the schedule's default; 1 or 2 with ``"auto"``.
        costs: Costs of the stages, or a JSON file of them (``save_costs`` of an earlier run). Nothing is measured then.
            ``held_after_forward`` and ``held_after_input`` are in GiB; if both are left at 1.0, bytes are estimated.
        save_costs: JSON file to which rank 0 writes measured costs, with any schedule.
        num_profiled_batches: Number of measured training batches, after two for warm-up.
        memory_limit_gib: Limit in GiB for microbatches on a rank between their F and their W, with any schedule. It
            counts tensors saved by autograd or kept by deferred weight gradients. Without a limit ``"auto"`` holds at
            most two microbatches per pipeline rank, like ``zb_h2``.
        device_memory_gib: Limit in GiB for all memory of a rank; cuts and ``"auto"`` keep to it. The dry run estimates
            parameters, gradients, optimizer state, activations, and buffers of messages and gathers. On a device,
            communicators are measured too. Leave room for temporaries of operations, the allocator, CUDA, and channels
            between ranks that are not neighbours.
        search_seconds: With ``"auto"``, time limit of rank 0's search in wall-clock seconds. Hand-made schedules are
            always compared. None: the search ends by its own criterion.
        post_validation: With clipping by norm, update weights before all ranks know the norm, if the previous norm was
            within the limit. If the norm then exceeds the limit, every rank undoes the update and the batch since, and
            repeats both. Results equal those of waiting bit for bit. Code between steps that uses weights, gradients or
            optimizer states waits for the norm. Every rank holds a second copy of these three. Works with torch's
            elementwise optimizers (AdamW, SGD, ...).
        whole_batch_loss: Run the code after the last unit once, on the joined outputs of all microbatches. Needed for a
            loss that is not a mean or sum over samples, such as an in-batch contrastive loss. With any schedule, every
            rank then runs all forwards first and holds all microbatches; ``lightning-pp-plan`` shows the cost. With
            several replicas it runs on each replica's batch, and gradients are averaged, as under DDP. By default that
            code runs once per microbatch, and means and sums are those of the batch of all replicas.
        check_first_batches: Run part of the first batches both in one piece and in two, forward only, and compare. This
            checks the first two batches of a fit, the first of validation, test and prediction, and later ones in which
            the step takes a new branch. A difference in loss or changed attributes ends a fit, other differences cause
            a warning; both say where samples are coupled. False: only a step that changes numbers on the module runs
            so, to see whether they add up.
        auxiliary_losses: Reaction to an auxiliary loss over all samples together, such as the balance loss of a mixture
            of experts. ``"error"``: the check of the first batches ends the run. ``"per_microbatch"``: each microbatch
            computes its own, as under gradient accumulation, and these are averaged, weighted by numbers of samples.
            The rest of the loss stays that of the batch.
        dynamic_step: Rehearse each microbatch before it runs, to find the units that it calls; about 0.1 ms per call.
            Set it only if an error says so: the calls then depend on state that the pipeline cannot see.
        on_nonfinite: Reaction to a NaN or infinite loss, or gradient before an update. ``"error"``: the run ends with a
            :class:`~lightning_pp.errors.NonFiniteError` before an update uses it. ``"skip"``: all ranks skip the
            update, with a warning. ``"ignore"``: nothing is checked. With ``"error"`` and ``"skip"``, weights that are
            not finite are not saved. With ``16-mixed`` the scaler skips updates.
        unequal_data: Reaction to ranks with different numbers of batches. ``"error"``: the run ends and names both
            numbers. ``"shortest"``: every loader ends on all ranks when the first rank runs out. With ``"shortest"``,
            data without a length cost an all-reduce before each batch.
        units: Names or shell patterns of modules that stay whole on one stage. None: found automatically.
        split_points: Names of the first units of stages 1, 2, ...; a block's child cuts the block there. By default the
            cut has the shortest step, by given measured costs, else by FLOPs and parameters. It is inside blocks if
            that makes the step at least 2 % shorter.
        unit_weights: Factor for the cost of units in the cut, by name or shell pattern.
        rank_speeds: Relative speed of each pipeline rank, if devices differ.
        split_head: Number of parts of a last ``nn.Linear``, split along its classes over several stages; False, or
            ``"auto"``. Its logits must go into one cross entropy. ``"auto"`` splits a head that costs more than a
            stage, if the step gets shorter. Every stage with a part holds the whole weight. Steps that use the logits
            otherwise (metrics, prediction) run the whole head on the last stage.
        sharding: How data-parallel ranks share a stage. ``"replicate"``: not at all; gradients are all-reduced.
            ``"shard_grad_op"``: parameters, gradients and optimizer states are sharded, and parameters gathered once
            per step. ``"full_shard"``: parameters are gathered before each window of use, and freed after it.
        unshard_budget: With ``"full_shard"``, limit in bytes for gathered parameters on a rank. None: two stages, but
            at most half of the rank's parameters and at least its two largest units.
        cpu_offload: Keep parameters, gradients and optimizer states of units on the host, and run the optimizer there.
            It works with one replica, but not with ``"replicate"``.
        data_parallel_replicate_size: Number of data-parallel ranks that hold the same shards (HSDP); a divisor of
            ``data_parallel_size``. Gathers stay within ``data_parallel_size / data_parallel_replicate_size`` ranks.
        compile: True, or options of ``torch.compile``: compile every unit separately. If the backward is split, their
            weight gradients are deferred to W too. Units that are one layer of torch are not compiled. Units cut over
            tensor ranks are compiled if they can be captured as one graph; the log names the others.
        activation_checkpointing: Units that keep only their inputs and run again in backward. True: units in lists of
            repeated blocks. ``"auto"``: as few of these as ``device_memory_gib`` requires, on the ranks above it. Names
            or patterns: those units. A policy, or a list of operations with saved outputs, as for
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: repeated blocks.
        activation_offload: Keep activations on the host (pinned on CUDA) between forward and backward, if computation
            hides both copies, by ``costs`` or by times measured in the first batches.
        save_distributed_checkpoint: True: every rank writes its shard, into a folder that loads under any other layout.
            False: one ``.ckpt`` file, which a plain ``Trainer()`` on one device can resume.
        async_checkpoint: Write checkpoints while training continues; see :meth:`wait_for_checkpoint`.
        meta_init: Run ``configure_model`` without allocating parameters, as with
            ``trainer.init_module(empty_init=True)``. Each rank allocates its parameters and initialises them with
            ``_init_weights`` or ``reset_parameters``. The values differ from those of one device.
        initial_weights: Path or URL of initial weights: a ``.safetensors`` file, a Hugging Face model directory, a
            checkpoint of any kind, or a saved ``state_dict``. Every rank reads only its parameters. The names may lack
            a prefix that all the module's names have.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; by default chosen for the device.
        deadlock_seconds: Seconds after which a deadlock ends the run: every rank waits for the others in one call, and
            none runs the user's code. After a deadlock all ranks end with code 1 and report their positions.
        preemption_seconds: After a signal the run ends at the next batch, which must begin within this many seconds.
            Otherwise all processes end at once with the signal's code (143 for SIGTERM) and save nothing. Raise it for
            long batches.
        timeout: Time limit of a collective or a message. None: ten minutes over NCCL, half an hour over gloo, as in
            torch. The first meeting of all processes may take half an hour.
        flight_recorder_dirpath: Folder for torch's flight recorder. If a collective or message over NCCL times out,
            each rank writes its latest ones there. None: nothing is recorded.
        split_batch: Function ``split_batch(batch, n)`` that cuts a batch on the device into at most ``n`` microbatches,
            for batches that must not be cut along dimension 0 (graphs, objects). The function returns a list of
            :class:`lightning_pp.BatchPart`, or of data whose tensors share one length along dimension 0, the same on
            every rank of a pipeline. In a configuration:
            ``{_target_: hydra.utils.get_method, path: my_module.split_graphs}``.
        batch_dim: Dimension of the samples of a tensor, if it is not 0, by the tensor's path in the batch:
            ``{"position_ids": 1}`` for shape ``(3, samples, length)``. In nested dicts a path is
            ``inputs.position_ids``, in a tuple ``[0]``, and a batch that is a tensor is ``batch``.

    Raises:
        ConfigurationError: The product of the sizes is not the number of devices; ``sharding`` is unknown; the budget
            is less than one unit; a number is less than 1; a file is for other sizes; no cut fits
            ``device_memory_gib``; or a pipeline does not support the module or the trainer.
        ScheduleError: The schedule is unknown or does not allow ``stages_per_rank``; its file cannot be run; or no
            schedule fits the memory limit.
    """

    def __init__(
        self,
        pipeline_parallel_size: int | Auto = "auto",
        data_parallel_size: int | Auto = "auto",
        num_microbatches: int | Auto = "auto",
        *,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: Mapping[str, Any] | Literal["auto"] = "auto",
        sequence_parallel: bool = False,
        schedule: str | PathLike[str] = "zb_h1",
        stages_per_rank: int | None = None,
        costs: StageCosts | str | PathLike[str] | None = None,
        save_costs: str | PathLike[str] | None = None,
        num_profiled_batches: int = DEFAULT_NUM_PROFILED_BATCHES,
        memory_limit_gib: float | None = None,
        device_memory_gib: float | None = None,
        search_seconds: float | None = None,
        post_validation: bool = False,
        whole_batch_loss: bool = False,
        check_first_batches: bool = True,
        auxiliary_losses: Auxiliary = "error",
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
        activation_offload: bool = False,
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
        batch_dim: BatchDim = None,
    ) -> None:
        shards = ShardingSettings(sharding, unshard_budget, cpu_offload, data_parallel_replicate_size)
        sizes = pipeline_parallel_size, data_parallel_size, tensor_parallel_size
        super().__init__(sizes, process_group_backend, timeout, shards, flight_recorder_dirpath)
        source = schedule_source(schedule, stages_per_rank, whole_batch_loss, search_seconds)
        asked = memory_limit_gib, given_costs(costs), num_profiled_batches, save_costs, activation_offload
        reactions = on_nonfinite, unequal_data, dynamic_step, batch_dim, auxiliary_losses
        batches = BatchOptions(num_microbatches, split_batch, check_first_batches, *reactions)
        cut = CutOptions(names_of(split_points), unit_weights, rank_speeds, names_of(units), split_head)
        of_ranks = activation_checkpointing, device_memory_gib, tensor_parallel_plan, sequence_parallel
        options = PipelineOptions(ScheduleOptions(source, *asked, post_validation), batches, cut, shards, *of_ranks)
        checkpoints = save_distributed_checkpoint, async_checkpoint, initial_weights
        self._begin(options, RunOptions(compile, meta_init, *checkpoints, deadlock_seconds, preemption_seconds))

    def _begin(self, options: PipelineOptions, run_options: RunOptions) -> None:
        """Keeps the options; the strategy builds its parts from them."""
        self.options, self.run_options = options, run_options
