"""The processes of a strategy and their collectives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from lightning_pp.distributed.gathering import gathered
from lightning_pp.distributed.groups import default_timeout, largest_of_all, timeout_of_groups, warm_up, world_options
from lightning_pp.distributed.launcher_store import attempt_store
from lightning_pp.distributed.loopback import gloo_on_loopback, keep_gloo_on_loopback, store_on_loopback
from lightning_pp.distributed.meeting import among_all_ranks, store_if_ended
from lightning_pp.distributed.meshes import groups_of_collectives, make_meshes
from lightning_pp.distributed.sizes import Auto, ParallelSizes, check_size
from lightning_pp.distributed.watch.this_rank import RankStoppedError
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.sharded_stages import ShardingSettings
from lightning_pp.runtime.split_backward.wide_products import try_products
from lightning_pp.sharding.shard_updates import end_update
from lightning_pp.sharding.stage_updates import end_stage_update
from lightning_pp.split.side_effects.generators import GeneratorStates
from lightning_pp.strategy._lightning_private import (
    check_overridden_names,
    give_device_mesh,
    init_process_group,
    reduced,
    trainer_of,
)
from lightning_pp.strategy._torch_private import job_store, set_timeout
from lightning_pp.strategy.device_queues import use_all_queues
from lightning_pp.strategy.faults.ends import refuse_aborted_groups
from lightning_pp.strategy.faults.flight_recorder import record_nccl
from lightning_pp.strategy.lightning.callers import line_of_user
from lightning_pp.strategy.lightning.launcher import RunLauncher

T = TypeVar("T")

_LONGEST_TIMEOUT = timedelta(days=3650)  # torch counts in nanoseconds


class MeshStrategy(ParallelStrategy):
    """A strategy whose processes form a mesh of pipeline x data-parallel x tensor ranks (:class:`ParallelSizes`).

    :meth:`reduce` and :meth:`all_gather` go over the replicas, whoever asks: within a pipeline all ranks hold the same
    logged values already. :meth:`reduce_boolean_decision`, :meth:`barrier` and :meth:`broadcast` go over all ranks,
    since Lightning saves, stops and names files by them.

    Args:
        sizes: Ranks along the pipeline, replicas, and tensor ranks; each of the first two may be ``"auto"``.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; by default what suits the device.
        timeout: How long a collective may wait, once all processes have met.
        sharding: What replicas share. With shards on the host collectives on its tensors have to work as well: those of
            tied parameters, of checkpoints, and what users ask of sharded parameters.
        flight_recorder_dirpath: Folder for what goes over NCCL, written when it times out.

    Raises:
        ConfigurationError: ``timeout`` is not positive, or longer than torch can wait; a size is less than 1.
    """

    def __init__(
        self,
        sizes: tuple[int | Auto, int | Auto, int],
        process_group_backend: str | None,
        timeout: timedelta | None,
        sharding: ShardingSettings,
        flight_recorder_dirpath: str | Path | None,
    ) -> None:
        check_overridden_names()
        if timeout is not None and not timedelta() < timeout <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"timeout={timeout!r} must be positive and at most {_LONGEST_TIMEOUT.days} days. None means ten "
                "minutes over NCCL and half an hour over gloo."
            )
        check_size("pipeline_parallel_size", sizes[0])  # whether sizes fit the devices is checked later
        super().__init__()
        self.num_nodes = 1  # set by the trainer
        self._asked_sizes = sizes
        self._sharding = sharding
        self._process_group_backend = process_group_backend
        self.timeout = timeout
        """How long a collective may wait: what was asked for, or from the set-up on what the backend has."""
        self._flight_recorder_dirpath = flight_recorder_dirpath
        self._sizes: ParallelSizes | None = None
        self._device_mesh: DeviceMesh | None = None
        self.communicators_bytes = 0
        """What communicators of collectives have taken of the device, on the rank where it is most."""
        self._data_parallel_mesh: DeviceMesh | None = None
        self._running_step: str | None = None
        self.num_collectives = 0
        """Collectives that Lightning and users have asked for; to be read from any thread."""
        self._world: dist.ProcessGroup | None = None

    # ---------------------------------------------------------------- processes

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def num_ranks(self) -> int:
        """Processes of the job, always ``trainer.world_size``."""
        return self.world_size

    @property
    def is_plain(self) -> bool:
        """Whether runs are Lightning's own, without a pipeline."""
        return False

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning is to give samplers a part of the data, and wait for other ranks."""
        return not self.is_plain

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            num_started = int(os.environ.get("LOCAL_WORLD_SIZE", self.local_rank + 1))
            if num_started > self.num_processes:
                raise ConfigurationError(
                    f"{num_started} processes were started on this node, but Trainer(devices=) has devices for "
                    f"{self.num_processes}. Set devices={num_started}, or start {self.num_processes} processes "
                    f"(torchrun --nproc-per-node {self.num_processes})."
                )
        _ = self.sizes  # a wrong product is told before any process is launched
        launcher = RunLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        launcher.check_program()
        self._launcher = launcher

    @property
    def weights_only(self) -> bool | None:
        """What the user passed to ``fit`` or its siblings; None if nothing."""
        return self.launcher.weights_only if isinstance(self.launcher, RunLauncher) else None

    def set_world_ranks(self) -> None:
        """Sets this process's rank in the cluster environment and in Lightning's rank-zero helpers."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # one function object, which Lightning exports under several names
        vars(rank_zero.rank_zero_only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        """Joins the process group and makes the device mesh."""
        use_all_queues(self.root_device)
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None and self.lightning_module is not None
        backend = self._process_group_backend or dist.get_default_backend_for_device(self.root_device)
        if self.root_device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # by default every process would take all cores, and the pipeline would run many times slower
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.num_processes))
        if self._sharding.cpu_offload and self.root_device.type != "cpu" and ":" not in backend:
            backend = f"cpu:gloo,{self.root_device.type}:{backend}"
        # Not bound to the device (device_id): torch would then split each further group off this one, which takes all
        # ranks of the world, and the ranks outside of a gloo group would wait for a split that its members do not make.
        record_nccl(self._flight_recorder_dirpath, backend)
        is_new = self._meet(backend)
        if self.timeout is None:
            self.timeout = default_timeout(backend)
        group_timeout = timeout_of_groups(self.timeout, backend)
        if is_new:
            set_timeout(group_timeout)
        self._sizes = self._resolve_sizes(self.num_ranks)
        self._warn_of_placement()
        if self._device_mesh is None:
            self._device_mesh, self._data_parallel_mesh = make_meshes(self.root_device.type, self.sizes)
            groups = groups_of_collectives(self._device_mesh, self._data_parallel_mesh)
            for group in groups:
                set_timeout(group_timeout, group)
            if self.root_device.type != "cpu":
                taken = warm_up(groups, self.root_device)
                self.communicators_bytes = largest_of_all(taken, self.root_device)
                try_products(self.root_device)
        give_device_mesh(self.lightning_module, self._device_mesh)
        if self.sizes.data_parallel > 1:
            reset_seed()  # as under DDP
        else:  # every rank draws what the first one would draw alone: the order of the data, and what hooks draw
            self.broadcast(GeneratorStates.now(torch.device("cpu"))).put_back(torch.device("cpu"))

    def _warn_of_placement(self) -> None:
        """Says where ranks on different nodes share what neighbours on one node should; once for the job."""
        if self.num_nodes == 1:
            return
        if self.global_rank == self.num_processes - 1 and self.node_rank != 0:
            warnings.warn(
                f"Rank {self.global_rank} is on node {self.node_rank}: the launcher distributes ranks over the nodes "
                "in turn. Groups that shard parameters have consecutive ranks, so they cross nodes, while pipelines do "
                "not. Have the launcher fill one node after the other (srun --distribution=block).",
                stacklevel=2,
            )
        if self.global_rank == 0 and self.num_processes % self.sizes.tensor:
            rank_zero.rank_zero_warn(
                f"tensor_parallel_size={self.sizes.tensor} does not divide the {self.num_processes} ranks of a node. "
                "The ranks that share a matrix cross nodes, so every layer waits for the network. Choose a divisor."
            )
        within = self.sizes.replicate_size_within_nodes(self.num_processes)
        if (
            self.global_rank == 0
            and within != self.sizes.data_parallel_replicate
            and self._sharding.mode != "replicate"
        ):
            remedy = (
                f"data_parallel_replicate_size={within} keeps them inside a node. Each rank then holds shards of "
                f"1/{self.sizes.data_parallel // within}, not 1/{self.sizes.data_parallel_shard}."
                if within is not None
                else f"Sizes that divide {self.num_processes} would stay inside a node."
            )
            rank_zero.rank_zero_warn(
                f"Groups of {self.sizes.data_parallel_shard} ranks shard parameters, but a node has "
                f"{self.num_processes} ranks. The groups cross nodes, so every gather goes over the network. {remedy}"
            )

    def _meet(self, backend: str) -> bool:
        """Joins the process group, on one node by sockets that no other host reaches; whether it is a new one."""
        environment = self.cluster_environment
        assert environment is not None
        # processes may come late: they import, and build models, before they meet
        timeout = max(self.timeout or default_pg_timeout, default_pg_timeout)
        num_ranks = environment.world_size()
        store: Store | None = None
        if dist.is_initialized():
            refuse_aborted_groups()
            store = store_if_ended(job_store(), environment.global_rank(), num_ranks, timeout)
        else:
            store = attempt_store(timeout)
        is_new = not dist.is_initialized()
        if num_ranks == self.num_processes and is_new:
            keep_gloo_on_loopback()
            store = store or store_on_loopback(
                environment.main_address, environment.main_port, environment.global_rank(), num_ranks, timeout
            )
        with gloo_on_loopback():
            options = world_options(backend, self.sizes)
            init_process_group(environment, backend, timeout=timeout, store=store, pg_options=options)
        if self._world is not None and self._world is not dist.group.WORLD:
            raise RuntimeError(
                "An exception ended the connections between the ranks, and the ranks have made new ones. This trainer "
                "has the old ones. Make a new Trainer, strategy and module, with ckpt_path= for the last checkpoint."
            )
        self._world = dist.group.WORLD
        return is_new

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks; after an exception it does not, since the others may never come."""
        if dist.is_initialized() and not self._is_interrupted:
            self._check_outside_step("barrier", self.num_ranks)
            on_gpu = "nccl" in dist.get_backend()
            with among_all_ranks():
                dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Rank ``src``'s object on every rank."""
        if not dist.is_initialized():
            return obj
        self._check_outside_step("broadcast", self.num_ranks)
        objects = [obj]
        with among_all_ranks():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Parameters made within are on the meta device with ``empty_init``, and get memory where they are owned."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # ---------------------------------------------------------------- sizes and groups

    @property
    def sizes(self) -> ParallelSizes:
        """Sizes of the mesh axes."""
        if self._sizes is None:
            self._sizes = self._resolve_sizes(self.num_nodes * self.num_processes)
        return self._sizes

    def _resolve_sizes(self, world_size: int) -> ParallelSizes:
        pipeline, data_parallel, tensor = self._asked_sizes
        return ParallelSizes.resolve(pipeline, data_parallel, world_size, self._sharding.replicate_size, tensor)

    @property
    def device_mesh(self) -> DeviceMesh:
        """With the axes that :class:`ParallelSizes` lists."""
        if self._device_mesh is None:
            raise RuntimeError("There is no device mesh yet. It is made when the processes have been launched.")
        return self._device_mesh

    @property
    def data_parallel_mesh(self) -> DeviceMesh:
        """The replicas at this rank's place in the pipeline, as one axis."""
        _ = self.device_mesh
        assert self._data_parallel_mesh is not None
        return self._data_parallel_mesh

    @property
    def pipeline_rank(self) -> int:
        """This rank's place along the pipeline."""
        return self.sizes.coordinates(self.global_rank)[0]

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the pipeline: how many see data of their own, which is what learning rates are scaled by."""
        return self.sizes.data_parallel

    @property
    def data_parallel_rank(self) -> int:
        """This rank's replica, from 0: which part of the data it reads, the same on all ranks of a pipeline."""
        return self.sizes.coordinates(self.global_rank)[1]

    @property
    def tensor_parallel_rank(self) -> int:
        """Which parts of matrices this rank holds, from 0; the ranks that differ only in it read the same data."""
        return self.sizes.coordinates(self.global_rank)[2]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samplers depend on the replica: all stages of one see the same samples."""
        return {"num_replicas": self.sizes.data_parallel, "rank": self.data_parallel_rank}

    # ---------------------------------------------------------------- collectives that Lightning and users ask for

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduces over the replicas: the ranks that hold the same stages, and see other data.

        Within a pipeline all ranks hold the same logged values already, so a sum over all ranks would count each
        replica once for each of its ranks.

        Args:
            tensor: A tensor of any shape; anything else is returned as it is.
            group: None and the group of all ranks: the replicas. Another group is used as it is.
            reduce_op: ``"mean"``, ``"sum"`` or a ``ReduceOp``.

        Raises:
            ConfigurationError: Called in a step, with several replicas.
        """
        if isinstance(tensor, Tensor):
            if _is_world(group):
                if self.sizes.data_parallel == 1:
                    return tensor
                self._check_outside_step("reduce", self.sizes.data_parallel)
                group = self.data_parallel_mesh.get_group()
            tensor = reduced(tensor, group, reduce_op=reduce_op)
        result: Tensor = tensor
        return result

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers from the replicas, as ``LightningModule.all_gather`` does from all ranks elsewhere.

        Args:
            tensor: Of one shape on all replicas.
            group: None and the group of all ranks: the replicas. Another group is used as it is.
            sync_grads: Whether gradients flow back to where the tensors came from.

        Returns:
            Shape ``(data_parallel_size, *tensor.shape)``; with one replica ``tensor``, as on one device.

        Raises:
            ConfigurationError: Called in a step, with several replicas.
        """
        if _is_world(group):
            if self.sizes.data_parallel == 1:
                return tensor
            self._check_outside_step("all_gather", self.sizes.data_parallel)
            return gathered(tensor, self.data_parallel_mesh.get_group(), sync_grads=sync_grads)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks: any of them may have got a signal to stop. Before a set-up each rank decides for itself."""
        if self.num_ranks == 1 or not dist.is_initialized():
            return decision
        self._check_outside_step("reduce_boolean_decision", self.num_ranks)
        votes = torch.full((), int(decision), device=self.root_device)
        with among_all_ranks():
            dist.all_reduce(votes)
        return int(votes) == self.num_ranks if all else int(votes) > 0

    @contextmanager
    def within_step(self, step: str) -> Iterator[None]:
        """Around the user's step: collectives are refused, since each stage runs a part of it for each microbatch.

        Args:
            step: Its name.
        """
        before, self._running_step = self._running_step, step
        try:
            yield
        finally:
            self._running_step = before

    def _check_outside_step(self, collective: str, num_ranks: int) -> None:
        self.num_collectives += 1
        if self._running_step is not None and num_ranks > 1:
            raise ConfigurationError(
                f"{self._running_step} calls strategy.{collective} among {num_ranks} ranks, at {line_of_user()}. In a "
                "pipeline a step runs once for each microbatch, and each stage stops after its last unit. So some "
                "ranks would wait for ever for a call that others do not make. Use self.log, which averages over "
                "replicas, or make the call in a hook (on_train_batch_end), where every rank has what the step "
                "returned."
            )

    def all_or_none(self, work: Callable[[], T]) -> T:
        """What ``work``, which may be the user's code, returns; if it raises on one rank, every rank raises.

        Every rank has to call it, and ``work`` must wait for no other rank.

        Raises:
            Exception: On the ranks where ``work`` raised, what it raised.
            RankStoppedError: On the others.
        """
        outcome, failure = None, None
        try:
            outcome = work()
        except Exception as error:
            failure = error
        if self.num_ranks > 1 and dist.is_initialized():
            failed = torch.full((), self.num_ranks if failure is None else self.global_rank, device=self.root_device)
            with among_all_ranks():
                dist.all_reduce(failed, dist.ReduceOp.MIN)
            if failure is None and (rank := int(failed)) < self.num_ranks:
                failure = RankStoppedError(f"Rank {rank} has failed in the set-up.")
        if failure is not None:
            raise failure
        result: Any = outcome
        return cast(T, result)

    def compute_on_rank0(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns or raises on global rank 0, on every rank."""
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.global_rank == 0:
            try:
                outcome = (compute(), None)
            except Exception as error:
                outcome = (None, error)
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return cast(T, result)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's; then the optimizer has its groups and sharded parameters again, also where the update failed."""
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        finally:
            end_update(optimizer)
            end_stage_update(optimizer)

    @property
    def _is_interrupted(self) -> bool:
        module = self.lightning_module
        trainer = None if module is None else trainer_of(module)
        return trainer is not None and trainer.interrupted


def _is_world(group: Any) -> bool:
    """Whether no group was chosen: ``LightningModule.all_gather`` then passes that of all ranks."""
    return group is None or (dist.is_initialized() and group is dist.group.WORLD)
