"""Costs of stages, estimated from a dry run before they are measured, and the memory of a microbatch on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pp.schedule import Placement, StageCosts
from lightning_pp.split.cut.partition import Partition
from lightning_pp.split.cut.unit_costs import stage_costs
from lightning_pp.split.memory.estimate import MemoryEstimate, estimate_memory
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import StepRecord

BYTES_PER_GIB = float(1 << 30)
HOST_GIB_PER_S = 40.0
"""Speed of copies between a device and its host, in one direction while others run in the other one.

An H200 over PCIe 5 reached 46 GiB/s so, from and to pinned memory, and 51 in one direction alone.
"""


@dataclass(frozen=True)
class DeviceSpeed:
    """The assumed speed of a device until it is measured; schedules depend on the ratios only.

    Attributes:
        flops_per_ms: Floating point operations.
        bytes_per_ms: Between two ranks.
        latency_ms: Of a message between two ranks.
        action_ms: Of an action beside its operations: Python, launches, bookkeeping.
    """

    flops_per_ms: float
    bytes_per_ms: float
    latency_ms: float
    action_ms: float


# a recent accelerator at 40 % of its bf16 peak with a fast network; a core or two with loopback sockets
_SPEEDS = {"cuda": DeviceSpeed(2e11, 2e7, 0.02, 0.2), "cpu": DeviceSpeed(3e7, 1e6, 0.1, 0.3)}


def assumed_speed(device_type: str) -> DeviceSpeed:
    """The speed of a device of that type; one that is not known is taken for a GPU."""
    return _SPEEDS.get(device_type, _SPEEDS["cuda"])


def estimated_costs(
    record: StepRecord,
    partition: Partition,
    placement: Placement,
    speed: DeviceSpeed,
    speeds_of_stages: Sequence[float] | None = None,
    *,
    whole_batch_loss: bool = False,
    offloads: bool = False,
) -> StageCosts:
    """Costs per stage from what a dry run counted; ``held_*`` in GiB.

    Times are those of the units' FLOPs, and a little for every action. A message costs its bytes and a latency, a copy
    to the host its bytes.

    Args:
        record: The dry run of a microbatch.
        partition: The stages that the step is cut into, with the costs of the units in FLOPs.
        placement: Which rank holds which stages.
        speed: Of the device.
        speeds_of_stages: How fast the rank of each stage is, compared with ``speed``; None: as fast.
        whole_batch_loss: Whether the last stage joins all microbatches.
        offloads: Whether activations may wait on the host.
    """
    costs = estimated_times(record, partition, speed, speeds_of_stages, whole_batch_loss=whole_batch_loss)
    memory = estimate_memory(record, partition, placement, (), whole_batch_loss=whole_batch_loss)
    held = _held_gib(memory)
    costs = with_held(costs, *held, whole_batch_loss=whole_batch_loss)
    return with_host(costs, [stage.offloadable_bytes for stage in memory.stages]) if offloads else costs


def with_host(costs: StageCosts, num_bytes: Sequence[int], unit: float = BYTES_PER_GIB) -> StageCosts:
    """``costs``, with ``held_*`` in ``unit`` bytes, where so many bytes of each stage may wait on the host."""
    copy_ms = [1e3 * each / BYTES_PER_GIB / HOST_GIB_PER_S for each in num_bytes]
    return replace(costs, offload=copy_ms, held_on_host=[each / unit for each in num_bytes])


def estimated_times(
    record: StepRecord,
    partition: Partition,
    speed: DeviceSpeed,
    speeds_of_stages: Sequence[float] | None = None,
    *,
    whole_batch_loss: bool = False,
) -> StageCosts:
    """As :func:`estimated_costs`, without what is held."""
    factors = speeds_of_stages or [1.0] * partition.num_stages
    if whole_batch_loss:
        record = replace(record, outputs_cross_alone=True)
    plan = build_plan(record, partition.stage_of_unit, partition.num_stages)
    sums = stage_costs(
        partition.unit_costs, partition.stage_of_unit, [speed.flops_per_ms * factor for factor in factors]
    )
    flop_times = sums.per_stage(partition.num_stages)
    sent = crossing_bytes(plan, record.num_tensor_ranks)
    to_and_fro = [max(sent[max(stage - 1, 0)], sent[stage]) for stage in range(len(sent))]
    return StageCosts(
        forward=[speed.action_ms + time for time in flop_times.forward],
        backward_input=[speed.action_ms + time for time in flop_times.backward_input],
        backward_weight=[speed.action_ms + time for time in flop_times.backward_weight],
        p2p=[speed.latency_ms + num_bytes / speed.bytes_per_ms for num_bytes in to_and_fro],
    )


def held_gib(
    record: StepRecord, partition: Partition, placement: Placement, *, whole_batch_loss: bool = False
) -> tuple[list[float], list[float]]:
    """GiB that a microbatch holds on each stage after F, with what it sent, and after I, by the dry run ``record``."""
    return _held_gib(estimate_memory(record, partition, placement, (), whole_batch_loss=whole_batch_loss))


def _held_gib(memory: MemoryEstimate) -> tuple[list[float], list[float]]:
    return (
        [(stage.held_after_forward_bytes + stage.sent_bytes) / BYTES_PER_GIB for stage in memory.stages],
        [num_bytes / BYTES_PER_GIB for num_bytes in memory.held_after_input],
    )


def crossing_bytes(plan: StepPlan, num_tensor_ranks: int) -> list[int]:
    """Bytes that a rank of each stage sends to later ones in the forward of one microbatch."""
    sent = [0] * len(plan.stages)
    for edge in plan.edges:
        sent[edge.source] += edge.spec.sent_bytes(num_tensor_ranks)
    return sent


def with_held(
    costs: StageCosts, after_forward: list[float], after_input: list[float], *, whole_batch_loss: bool = False
) -> StageCosts:
    """``costs`` with other ``held_*``; nothing holds less after F than after I, but with ``whole_batch_loss``.

    All microbatches are held after F then, so that the difference would count for each of them.
    """
    most = after_forward if whole_batch_loss else [max(pair) for pair in zip(after_forward, after_input, strict=True)]
    return replace(costs, held_after_forward=most, held_after_input=after_input)
