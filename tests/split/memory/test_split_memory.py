"""The estimate of memory, against allocations watched while stages run, and against plain arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import architectures
import pytest
import torch
from model_parts import doubled
from one_process import OneProcessPipeline, gradients_of_sent, loss_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import Placement, build_schedule
from lightning_pp.split.memory.estimate import MemoryEstimate, estimate_memory
from lightning_pp.split.memory.state_memory import ParameterSize, StateSizes, StepDtypes, optimizer_bytes_per_parameter
from lightning_pp.split.record.step_record import Value

NUM_STAGES = 3
ARCHITECTURES = [
    "residual_mlp",
    "encoder_decoder",
    "resnet",
    "unet",
    "mixture_of_experts",  # its units run on made-up data
    "recurrent",  # whose products are not deferred
    "checkpointed",  # by the user
    "tied_by_hand",
    "frozen_trunk",
    "separate_lists",
]


def made(name: str) -> tuple[OneProcessPipeline, Any]:
    torch.manual_seed(7)
    batch = doubled(architectures.ARCHITECTURES[name][1](6))
    return OneProcessPipeline(architectures.ARCHITECTURES[name][0], batch, NUM_STAGES, splits_backward=True), batch


def estimate(
    pipeline: OneProcessPipeline, batch: Any, checkpointed_units: Collection[str] = (), **options: Any
) -> MemoryEstimate:
    split = pipeline.split
    record = replace(pipeline.plans(batch)[0].record, recomputed_units=frozenset(checkpointed_units))
    return estimate_memory(record, split.partition, split.placement, split.parameter_sizes, **options)


@pytest.mark.by_day(6)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_activations_are_those_that_live(name: str) -> None:
    pipeline, batch = made(name)
    estimated = estimate(pipeline, batch)
    pipeline.run([batch], [1.0])  # gradients are there from now on, and W adds to them
    plans, kept, after_forward = zip(*pipeline.watched_forwards(batch), strict=True)
    after_input: list[int] = []
    gradients: dict[Value, list[torch.Tensor]] = {}
    for stage, plan, in_flight in reversed(list(zip(pipeline.stages, plans, kept, strict=True))):
        sent = gradients_of_sent(plan.stages[stage.number], gradients)
        returned = stage.runner.backward(plan, in_flight, sent, 1.0, split=True)
        in_flight.end_backward()
        for value, gradient in returned.items():
            gradients.setdefault(value, []).append(gradient.clone())
        del returned, sent
        given = {leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves(batch)}
        entries = {
            factor.untyped_storage().data_ptr(): factor.untyped_storage().nbytes()
            for entry in in_flight.queue._entries
            for factor in entry[1:3]
        }
        after_input.append(sum(num_bytes for address, num_bytes in entries.items() if address not in given))
    # Scalars of the loss, and small tensors of the step that no gradient needs, are not in the estimate.
    assert estimated.held_after_forward == pytest.approx(list(after_forward), rel=0.1, abs=300)
    assert estimated.held_after_input == pytest.approx(list(reversed(after_input)), rel=0.1, abs=300)


def test_checkpointed_units_keep_their_inputs() -> None:
    pipeline, batch = made("residual_mlp")
    whole = estimate(pipeline, batch)
    units = list(pipeline.split.units)
    less = estimate(pipeline, batch, checkpointed_units=units)
    calls = pipeline.plans(batch)[0].record.calls
    for stage, (before, after) in enumerate(zip(whole.stages, less.stages, strict=True)):
        owned = [call for call in calls if pipeline.split.partition.stage_of_unit[call.unit] == stage]
        inputs: dict[int, int] = {}
        for call in owned:
            inputs |= call.given
        tail = sum(pipeline.plans(batch)[0].record.tail.memory.saved.values()) if stage == NUM_STAGES - 1 else 0
        assert after.held_after_forward_bytes == sum(inputs.values()) + tail < before.held_after_forward_bytes
        assert after.held_after_input_bytes == before.held_after_input_bytes
        assert after.recomputed_bytes > 0 == before.recomputed_bytes


def sizes(dtype: torch.dtype = torch.float32) -> list[ParameterSize]:
    """A model of two units of a stage each, with a frozen table in the first and a parameter outside of units."""
    return [
        ParameterSize("first.table", (100, 10), dtype, False, "first", (0,)),
        ParameterSize("first.weight", (10, 10), dtype, True, "first", (0,)),
        ParameterSize("second.weight", (9, 10), dtype, True, "second", (1,)),
        ParameterSize("tied", (7, 10), dtype, True, None, (0, 1)),
    ]


def state_of(sharding: str, num_shards: int, rank: int, **options: Any) -> Any:
    record, partition = empty_step()
    return (
        estimate_memory(
            record,
            partition,
            Placement.interleaved(2),
            sizes(),
            StateSizes(sharding=sharding, num_shards=num_shards, optimizer_bytes=8, **options),  # type: ignore[arg-type]
        )
        .ranks[rank]
        .state
    )


def empty_step() -> Any:
    from lightning_pp.split.cut.partition import Partition
    from lightning_pp.split.record.step_record import StepRecord

    return StepRecord(), Partition(2, {"first": 0, "second": 1}, {})


def test_state_by_mode() -> None:
    whole = state_of("replicate", 1, 0)
    assert whole.parameters_bytes == (1000 + 100 + 70) * 4
    assert whole.gathered_parameters_bytes == whole.reduced_gradients_bytes == 0
    assert whole.gradients_bytes == (100 + 70) * 4
    assert whole.optimizer_state_bytes == (100 + 70) * 8

    sharded = state_of("shard_grad_op", 4, 0)
    assert sharded.parameters_bytes == (250 + 30 + 70) * 4  # 10 rows are padded to 4 x 3; what is direct stays whole
    assert sharded.gathered_parameters_bytes == (1000 + 120) * 4
    assert sharded.gradients_bytes == (100 + 70) * 4
    assert sharded.reduced_gradients_bytes == 30 * 4
    assert sharded.optimizer_state_bytes == (30 + 70) * 8

    offloaded = state_of("shard_grad_op", 4, 0, cpu_offload=True)
    assert offloaded.parameters_bytes == 70 * 4 and offloaded.optimizer_state_bytes == 70 * 8
    assert offloaded.reduced_gradients_bytes == 0
    assert offloaded.host_bytes == (250 + 30) * 4 + 30 * 4 + 30 * 8
    assert (offloaded.gathered_parameters_bytes, offloaded.gradients_bytes) == (1120 * 4, 170 * 4)
    alone = state_of("full_shard", 1, 1, cpu_offload=True)  # one replica gathers from its own host
    assert (alone.parameters_bytes, alone.gathered_parameters_bytes) == (70 * 4, 90 * 4)

    mixed = state_of("full_shard", 3, 1, dtypes=StepDtypes(torch.bfloat16, torch.float32))
    assert mixed.parameters_bytes == (30 + 70) * 4
    assert mixed.gathered_parameters_bytes == 90 * 2
    assert mixed.gradients_bytes == (90 + 70) * 4
    assert state_of("replicate", 1, 1, dtypes=StepDtypes(torch.bfloat16)).gathered_parameters_bytes == 90 * 2


def test_gathered_window_follows_the_budget() -> None:
    record, partition = empty_step()
    parameters = [
        ParameterSize(f"{index}.weight", (10, 10), torch.float32, True, str(index), (0,)) for index in range(4)
    ]

    def gathered(**options: Any) -> int:
        state = StateSizes(num_shards=2, sharding="full_shard", **options)
        estimated = estimate_memory(record, partition, Placement.interleaved(2), parameters, state)
        return estimated.ranks[0].state.gathered_parameters_bytes

    assert gathered() == 2 * 400  # as training chooses: half of what the rank holds, and no less than two units
    assert gathered(unshard_budget=100) == 400  # the unit in use
    assert gathered(unshard_budget=1000) == 1000
    assert gathered(unshard_budget=10**6) == 4 * 400


def test_peak_follows_the_schedule() -> None:
    pipeline, batch = made("residual_mlp")
    schedules = {
        name: build_schedule(name, num_ranks=NUM_STAGES, num_microbatches=8) for name in ("gpipe", "1f1b", "zb_h1")
    }
    peaks = {name: estimate(pipeline, batch, schedule=schedule) for name, schedule in schedules.items()}
    for rank in range(NUM_STAGES):
        stage = peaks["gpipe"].stages[rank]
        assert peaks["gpipe"].ranks[rank].activations_bytes == 8 * stage.held_after_forward_bytes
        assert peaks["1f1b"].ranks[rank].activations_bytes == (NUM_STAGES - rank) * stage.held_after_forward_bytes
    limit = max(rank.peak_bytes for rank in peaks["zb_h1"].ranks)
    for rank_memory in peaks["zb_h1"].ranks:
        assert rank_memory.activations_bytes <= limit - rank_memory.bytes_beside_activations


def test_optimizer_state_is_read_off_the_optimizer() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    assert optimizer_bytes_per_parameter(torch.optim.AdamW([weight])) == 8
    assert optimizer_bytes_per_parameter(torch.optim.AdamW([weight], amsgrad=True)) == 12
    assert optimizer_bytes_per_parameter(torch.optim.AdamW([weight]), torch.bfloat16) == 4
    assert optimizer_bytes_per_parameter(torch.optim.SGD([weight], lr=0.1)) == 0
    assert optimizer_bytes_per_parameter(torch.optim.SGD([weight], lr=0.1, momentum=0.9)) == 4
    assert optimizer_bytes_per_parameter(torch.optim.Adafactor([weight])) == 2 * 64 * 4 / 64**2
    with pytest.raises(ConfigurationError, match="LBFGS cannot step a single parameter"):
        optimizer_bytes_per_parameter(torch.optim.LBFGS([weight]))


def test_nothing_holds_what_was_sent() -> None:
    pipeline, batch = made("residual_mlp")
    kept, output = pipeline.forward(batch)
    sent = [StorageWeakRef(tensor.untyped_storage()) for in_flight in kept for tensor in in_flight.outputs.values()]
    assert len(sent) == NUM_STAGES - 1 and not any(reference.expired() for reference in sent)
    for in_flight in kept:  # as the executor does after sending
        in_flight.outputs.clear()
    assert all(reference.expired() for reference in sent)
    kept[-1].loss = loss_of(output)
    pipeline.backward(pipeline.plans(batch), kept, 1.0)
    assert all(gradient is not None for stage in pipeline.stages for gradient in stage.gradients().values())
