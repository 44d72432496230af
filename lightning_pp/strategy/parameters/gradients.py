"""This rank's parameters, their shards over replicas, and their gradients over replicas and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.meshes import same_stages, sharding_mesh
from lightning_pp.planning.sharded_stages import ShardedPrograms, make_units
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Schedule, Sharding
from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.gradients.clip import (
    NormUnderWay,
    clip_by_norm_,
    clip_by_value_,
    own_square,
    start_global_norm,
)
from lightning_pp.sharding.gradients.hooks import GradientHooks
from lightning_pp.sharding.gradients.replicated import ReplicatedGradients, WideGradients
from lightning_pp.sharding.gradients.shared import SharedParameters
from lightning_pp.sharding.replicated_units import ReplicatedUnits
from lightning_pp.sharding.stages import ShardedStages
from lightning_pp.sharding.units.collective_times import CollectiveClock
from lightning_pp.sharding.units.host_memory import return_freed_memory
from lightning_pp.strategy.parameters.placing import ParameterPlacing
from lightning_pp.strategy.parameters.precision import step_dtypes
from lightning_pp.strategy.parameters.tensor_units import check_and_report
from lightning_pp.strategy.surroundings import Surroundings


class StageGradients:
    """Shards this rank's units over the replicas, or keeps them whole; makes its gradients those of the whole batch.

    Gradients are averaged over the replicas and summed over the stages that hold a parameter, once per optimizer step.
    Parameters that are used outside their unit stay whole: nobody would gather them there. When units are gathered,
    freed and reduced within a batch is in its program.

    Args:
        given: Where the pipeline runs, what to shard and when, and the dtypes of computation and of gradients.
        split: The split model, with only this rank's parameters left in it; they get memory here.
        groups: Who has to agree on what is sharded.

    Attributes:
        clock: Times gathers and reductions of a batch, if it is switched on before it.
        cut: The parameters cut over tensor ranks, by canonical name.
    """

    def __init__(self, given: Surroundings, split: SplitModel, groups: ControlGroups) -> None:
        mesh, device, sharding, rank = given.mesh, given.device, given.options.sharding, given.rank
        dtypes = step_dtypes(given.precision)
        self.clock, self.device = CollectiveClock(device), device
        self._module = split.module
        self._split = split
        self._rank = rank
        self._data_parallel = given.data_parallel
        self._units: ShardedUnits | ReplicatedUnits = ReplicatedUnits({})
        self._programs: ShardedPrograms | None = None
        self._replicated = ReplicatedGradients([])
        # with one replica as well, parameters have the dtype of computation inside units
        gathers = self._data_parallel.size() > 1 or sharding.cpu_offload
        has_units = gathers or dtypes.compute is not None
        names, is_cast = split.fake_parameters.canonical_names, split.fake_parameters.is_cast
        group = self._data_parallel.get_group()
        units = split.units_of(rank)
        owned = split.owned_by(rank)
        whole = {name for name in owned if name in split.direct or (dtypes.compute is not None and not is_cast(name))}
        is_sharded = has_units and sharding.replaces_parameters(dtypes)
        one_by_one = units if is_sharded or split.tensor is not None else {}
        group_of_stages = same_stages(mesh).get_group()
        placing = ParameterPlacing(split, one_by_one, whole, device, group_of_stages, is_sharded=is_sharded)
        placing.place_whole(owned)
        for name in one_by_one if not is_sharded else ():
            placing.place_units({name: units[name]})
        if has_units:
            direct = [p for name, p in split.module.named_parameters() if names[name] in whole]
            self._units = make_units(
                sharding, units, sharding_mesh(mesh), direct, dtypes, placing.place_units, self.clock
            )
            split.fake_parameters.tie_names(lambda parameter: isinstance(parameter, DTensor))
            reduced = self._units.parameters if isinstance(self._units, ReplicatedUnits) else ()
            others = [p for p in split.module.parameters() if not isinstance(p, DTensor) and p not in reduced]
            self._replicated = ReplicatedGradients(others, group, clock=self.clock)
            if gathers:
                self._programs = ShardedPrograms(sharding, split, self._units, rank, groups, self.clock)
        plain = [p for p in split.module.parameters() if not isinstance(p, DTensor)]
        self._wide = WideGradients(plain, dtypes.gradient)
        self._num_copies = same_stages(mesh).size() // self._data_parallel.size()
        parts = split.tensor_parts
        self.cut = {names[name]: p for name, p in split.module.named_parameters() if names[name] in parts}
        self._cut_ids = set(map(id, self.cut.values()))
        check_and_report(split, groups)
        named = {names[name]: parameter for name, parameter in split.module.named_parameters()}
        shared = {name: parameter for name, parameter in named.items() if len(split.ranks_of(name)) > 1}
        global_ranks = mesh["pipeline"].mesh.tolist()  # of this rank's replica
        holders = {name: [global_ranks[rank] for rank in split.ranks_of(name)] for name in shared}
        self._shared = SharedParameters(shared, holders)
        self._shared.broadcast_initial()
        self._hooks = GradientHooks(named, self._shared.parameters.values())
        if isinstance(self._units, ReplicatedUnits):
            self._units.before_reduction = self._hooks.run
        return_freed_memory()

    def dry(self) -> AbstractContextManager[None]:
        """In the block, unit calls gather nothing, because fakes replace their parameters."""
        return self._units.paused() if isinstance(self._units, ShardedUnits) else nullcontext()

    @property
    def stages(self) -> ShardedStages | None:
        """What carries out the sharding actions of programs; None where there are none."""
        return None if self._programs is None else self._programs.stages

    @property
    def sharding(self) -> Sharding | None:
        """What the stages gather and reduce; None if nothing."""
        return None if self._programs is None else self._programs.sharding

    def most_microbatches(self, number: int, *, reduce: bool) -> int:
        """For how many microbatches a batch's program has to be; see :class:`ShardedPrograms`."""
        return number if self._programs is None else self._programs.most_microbatches(number, reduce=reduce)

    def begin(self, schedule: Schedule, number: int, *, reduce: bool) -> Schedule:
        """Before the batch that ``schedule`` was made for; returns what to run for ``number`` microbatches."""
        if not schedule.forward_only:
            if isinstance(self._units, ShardedUnits):
                self._units.begin_step()
            self._wide.begin()
            self._hooks.begin()
        return schedule if self._programs is None else self._programs.begin(schedule, number, reduce=reduce)

    def end(self, *, reduce: bool) -> None:
        """After the forward and backward of a batch; with ``reduce``, after the last of an accumulation."""
        self._hooks.end()
        self._units.end_of_batch(reduce=reduce)
        if not reduce:
            return
        self._replicated.all_reduce()
        self._wide.end()
        if self._shared.parameters:
            with self.clock.exposed("reduce"):
                self._shared.sum_gradients()

    def finish_evaluation(self) -> None:
        """After the forward of an evaluation batch: frees gathered parameters."""
        if isinstance(self._units, ShardedUnits):
            self._units.reshard_all()

    def abandon(self) -> None:
        """Forgets a step that failed."""
        self._hooks.abandon()
        self._units.abandon_step()
        self._replicated.abandon()
        self._wide.end()
        for parameter in self._module.parameters():
            parameter.grad = None

    def take_apart(self) -> None:
        """Drops gradients, and makes sharded units ordinary modules again, which hold shards until given others."""
        self.abandon()
        if isinstance(self._units, ShardedUnits):
            self._units.take_apart()
        if self._split.tensor is not None:
            self._split.tensor.release()

    def squares(self) -> list[float]:
        """This rank's parts of squared gradient norms: of all that it counts in the norm of the model, then by stage.

        Summed over the ranks that hold the same stages they are the squares themselves. A parameter of several stages
        counts in each of them, and once in the first number. Waits for the device; no collective.
        """
        names, stages = self._split.fake_parameters.canonical_names, self._split.placement.stages_of_rank(self._rank)
        named = [(names[name], p, self._share(p)) for name, p in self._module.named_parameters()]
        counted = self._counted(p for _, p, _ in named)
        of_stages = [[(p, share) for name, p, share in named if stage in self._split.owners[name]] for stage in stages]
        squares = [own_square(some, self._data_parallel) for some in (counted, *of_stages)]
        found: list[float] = torch.stack(squares).tolist()
        return found

    def install_clipping(
        self, precision: Precision, clip: Callable[[Optimizer, Iterable[nn.Parameter], float], None]
    ) -> None:
        """Makes ``precision`` clip by the norm over all stages and shards, shared parameters counted once.

        Args:
            precision: The plugin.
            clip: Clips the gradients of an optimizer's parameters by their norm, on every rank.
        """

        def clip_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            clip(optimizer, precision.main_params(optimizer), clip_val)

        def clip_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
            clip_by_value_(precision.main_params(optimizer), clip_val)

        vars(precision).update(clip_grad_by_norm=clip_by_norm, clip_grad_by_value=clip_by_value)

    def clip_by_norm(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float = 2.0,
        note: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """As :func:`clip_by_norm_`, of what all ranks give; every rank has to call it with its part, or with none."""
        counted = self._counted(parameters)
        return clip_by_norm_(counted, max_norm, mesh=self._data_parallel, norm_type=norm_type, note=note)

    def start_norm(self, parameters: Iterable[nn.Parameter]) -> NormUnderWay:
        """Starts to compute the 2-norm that :meth:`clip_by_norm` clips by; every rank has to call it."""
        return start_global_norm(self._counted(parameters), mesh=self._data_parallel)

    def _counted(self, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, float]]:
        """Each parameter with the share of its norm that counts here."""
        return [(p, self._share(p) if self._shared.counts_here(p) else 0.0) for p in parameters]

    def _share(self, parameter: nn.Parameter) -> float:
        """Tensor ranks that hold the same parameter count it in parts."""
        return 1.0 if id(parameter) in self._cut_ids else 1.0 / self._num_copies
