"""The memory of a rank with any schedule: parameters, gathered ones, gradients, optimizer state."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import Sharding
from lightning_pp.schedule.sharding import ShardingMode
from lightning_pp.split.fakes.parameters import FakeParameters


@dataclass(frozen=True)
class ParameterSize:
    """One parameter of the model.

    Attributes:
        name: Its canonical name.
        shape: Its whole shape.
        dtype: The dtype that it is kept in.
        is_trainable: Whether it requires a gradient.
        unit: The unit that holds it; None if it is used outside of one, and so never sharded.
        stages: The stages that hold it; more than one where it is shared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    unit: str | None
    stages: tuple[int, ...]

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @cached_property
    def is_shardable(self) -> bool:
        """Whether FSDP2 can shard it: it has rows, is of floating point and is used in its unit only."""
        return self.unit is not None and bool(self.shape) and (self.dtype.is_floating_point or self.dtype.is_complex)

    def num_elements_held(self, num_shards: int) -> int:
        """Elements that one rank keeps of it; rows are padded to a multiple of the shards."""
        if num_shards == 1 or not self.is_shardable:
            return self.num_elements
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])


_Held = tuple[ParameterSize, int, bool]  # with elements that a rank keeps, and whether units compute with a copy


@dataclass(frozen=True)
class StepDtypes:
    """Dtypes of a step, where they differ from those of the parameters.

    Attributes:
        compute: Dtype of the parameters inside units; None: as they are kept.
        gradient: Dtype of accumulation and reduction; None: that of the parameters.
    """

    compute: torch.dtype | None = None
    gradient: torch.dtype | None = None


@dataclass(frozen=True)
class StateMemory:
    """The memory of a rank, or of one of its stages, with any schedule. All in bytes.

    Attributes:
        parameters_bytes: Parameters between steps, shards where they are sharded.
        gathered_parameters_bytes: Whole parameters beside them during a step.
        gradients_bytes: Whole gradients, while microbatches accumulate.
        reduced_gradients_bytes: Gradients after the reduction, until they are set to zero; 0 if they are reduced
            in place.
        optimizer_state_bytes: The optimizer's state.
        host_bytes: With offloading, the units' parameters, reduced gradients, optimizer state and copies of these. They
            are on the host, and not in the other numbers.
        copies_bytes: With ``post_validation``, copies of parameters, reduced gradients and optimizer state.
    """

    parameters_bytes: int
    gathered_parameters_bytes: int
    gradients_bytes: int
    reduced_gradients_bytes: int
    optimizer_state_bytes: int
    host_bytes: int = 0
    copies_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What there is while microbatches run: everything but the reduced gradients."""
        between_steps = self.parameters_bytes + self.optimizer_state_bytes + self.copies_bytes
        return between_steps + self.gathered_parameters_bytes + self.gradients_bytes


@dataclass(frozen=True)
class StateSizes:
    """Counts the bytes of parameters, and of gradients, state and copies beside them.

    Attributes:
        dtypes: Of computation and of gradients; by default those of the parameters.
        sharding: ``replicate``: all parameters whole on every rank. ``shard_grad_op``: sharded between steps, gathered
            during a step. ``full_shard``: sharded, and gathered a few units at a time. Gradients accumulate whole in
            all of them and are sharded when they are reduced.
        num_shards: Ranks that share the parameters of a stage; 1 with ``replicate``.
        unshard_budget: With ``full_shard``, the bytes that gathered parameters may take; by default what training
            chooses, see :meth:`~lightning_pp.schedule.sharding.Sharding.budget_of`.
        optimizer_bytes: Of the optimizer's state for each element, see :func:`optimizer_bytes_per_parameter`.
        cpu_offload: Whether what is sharded lies on the host between its uses.
        num_copies: Replicas that average whole gradients.
        keeps_copies: Whether updates can be undone by copies of what they change.
    """

    dtypes: StepDtypes = field(default_factory=StepDtypes)
    sharding: ShardingMode = "replicate"
    num_shards: int = 1
    unshard_budget: int | None = None
    optimizer_bytes: float = 0.0
    cpu_offload: bool = False
    num_copies: int = 1
    keeps_copies: bool = False

    def of(self, parameters: Iterable[ParameterSize], stages: Collection[int]) -> StateMemory:
        """What ``stages``, all of one rank, hold of ``parameters``."""
        held = [(p, p.num_elements_held(self.num_shards), self._is_gathered(p)) for p in parameters]
        gathered = [each for each in held if each[2]]
        offloaded = gathered if self.cpu_offload else []
        on_device = [each for each in held if not each[2]] if self.cpu_offload else held
        trainable = [p for p, *_ in held if p.is_trainable]
        return StateMemory(
            parameters_bytes=self._kept(on_device),
            gathered_parameters_bytes=self._gathered_at_a_time(gathered, stages),
            gradients_bytes=sum(p.num_elements * self._gradient_dtype(p).itemsize for p in trainable),
            reduced_gradients_bytes=self._reduced(on_device),
            optimizer_state_bytes=self._optimizer_state(on_device),
            host_bytes=self._kept(offloaded)
            + self._reduced(offloaded)
            + self._optimizer_state(offloaded)
            + self._copies(offloaded),
            copies_bytes=self._copies(on_device),
        )

    def _kept(self, held: Iterable[_Held]) -> int:
        return sum(number * p.dtype.itemsize for p, number, _ in held)

    def _reduced(self, held: Iterable[_Held]) -> int:
        return self._kept(each for each in held if each[2] and each[0].is_trainable)

    def _optimizer_state(self, held: Iterable[_Held]) -> int:
        return round(sum(number for p, number, _ in held if p.is_trainable) * self.optimizer_bytes)

    def _copies(self, held: Iterable[_Held]) -> int:
        trained = [each for each in held if each[0].is_trainable] if self.keeps_copies else []
        return 2 * self._kept(trained) + self._optimizer_state(trained)

    def flat_gradients_of(self, parameters: Iterable[ParameterSize]) -> int:
        """Flat copies for averaging gradients: of all gradients if whole, otherwise of the largest unit."""
        if self.num_copies > 1:
            return sum(p.num_elements * self._gradient_dtype(p).itemsize for p in parameters if p.is_trainable)
        units: dict[str | None, int] = {}
        for p in parameters:
            if p.is_trainable and self._is_gathered(p):
                num_bytes = p.num_elements_held(self.num_shards) * self.num_shards * self._gradient_dtype(p).itemsize
                units[p.unit] = units.get(p.unit, 0) + num_bytes
        return max(units.values(), default=0)

    def _is_gathered(self, parameter: ParameterSize) -> bool:
        """Whether units compute with other tensors than those kept between steps."""
        return parameter.is_shardable and (
            self.sharding != "replicate" or self.dtypes.compute not in (None, parameter.dtype)
        )

    def _gathered_at_a_time(self, gathered: Iterable[_Held], stages: Collection[int]) -> int:
        units: dict[str, int] = {}
        units_of_stages: dict[int, set[str]] = {stage: set() for stage in stages}
        for p, number, _ in gathered:
            assert p.unit is not None  # what no unit holds is not gathered
            dtype = self.dtypes.compute if self.dtypes.compute and p.dtype.is_floating_point else p.dtype
            num_bytes = number * self.num_shards * dtype.itemsize
            units[p.unit] = units.get(p.unit, 0) + num_bytes
            for stage in set(p.stages) & units_of_stages.keys():
                units_of_stages[stage].add(p.unit)
        whole = sum(units.values())
        if self.sharding != "full_shard" or not units:
            return whole
        held = tuple(tuple(own) for own in units_of_stages.values())
        budget = Sharding("full_shard", held, units, self.unshard_budget).budget_of(range(len(held)))
        return min(whole, max(budget, max(units.values())))

    def _gradient_dtype(self, parameter: ParameterSize) -> torch.dtype:
        return self.dtypes.gradient or parameter.dtype


def parameter_sizes(
    fake_parameters: FakeParameters,
    units: Mapping[str, nn.Module],
    owners: Mapping[str, Sequence[int]],
    direct: Collection[str] = (),
) -> tuple[ParameterSize, ...]:
    """The parameters of a model, for :func:`estimate_memory`; real, fake and meta ones alike.

    ``owners`` has the stages that hold each parameter, ``direct`` the parameters that are used outside their unit, both
    by canonical name.
    """
    unit_of = fake_parameters.unit_of_parameters(units)
    sizes = []
    for name, stages in owners.items():
        parameter = fake_parameters.names[name]
        unit_name = None if name in direct else unit_of.get(name)
        sizes.append(
            ParameterSize(
                name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, unit_name, tuple(stages)
            )
        )
    return tuple(sizes)


def optimizer_bytes_per_parameter(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> float:
    """Bytes of state that an optimizer keeps for each element of a parameter, found by stepping a small parameter.

    States that do not grow with the parameter (a step count) do not count. A state that grows slower (Adafactor keeps
    rows and columns) counts as it is for a square of 64 × 64.

    Args:
        optimizer: An optimizer, which is left as it is.
        dtype: Dtype of the parameters.

    Raises:
        ConfigurationError: It cannot be stepped with one gradient, as one that needs a closure (LBFGS).
    """
    parameter = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        made = copy.copy(optimizer)
        group = optimizer.param_groups[0] if optimizer.param_groups else optimizer.defaults
        made.param_groups = [{**group, "params": [parameter], "param_names": ["lone"]}]
        made.state = defaultdict(dict)
        made.step()
    except Exception as error:
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot step a single parameter with a gradient ({type(error).__name__}: "
            f"{error}), so the size of its state is not known."
        ) from error
    state = made.state.get(parameter, {})
    held = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    return sum(value.untyped_storage().nbytes() for value in held) / parameter.numel()
