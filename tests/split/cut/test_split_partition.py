"""The cut of real models, against trying every cut, and its costs against counting on the real model."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from model_parts import Block, next_token_loss
from one_process import build, record_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers_by_hand import WithLoss

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import Placement, StageCosts
from lightning_pp.split.cut.partition import Partition, UnitMemory, partition_units
from lightning_pp.split.cut.unit_costs import (
    FLOPS_PER_PARAMETER,
    UnitCost,
    calibrated,
    estimate_unit_costs,
    stage_costs,
    weighted,
)
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.unit_calls.units import discover_units

MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=12, n_head=4, attn_implementation="eager")
    ),
    "llama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=10,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=512, d_model=48, d_kv=12, d_ff=128, num_layers=6, num_heads=4, decoder_start_token_id=0)
    ),
}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 500, (2, 24))
    return {"input_ids": ids, "labels": ids}


def recorded_model(name: str) -> tuple[nn.Module, StepRecord, dict[str, int]]:
    module = build(lambda: WithLoss(MODELS[name]()))
    units = discover_units(module)
    return (
        module,
        record_of(module, tokens()),
        {unit: sum(p.numel() for p in units[unit].parameters()) for unit in units},
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", MODELS)
def test_costs_add_up_to_the_operations_of_the_real_step(name: str) -> None:
    module, record, num_parameters = recorded_model(name)
    costs = estimate_unit_costs(record, num_parameters).values()
    counted = []
    batch = tokens()
    with FlopCounterMode(display=False) as counter:
        loss = module.model(**batch).loss
    counted.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counted.append(counter.get_total_flops())
    assert sum(cost.forward for cost in costs) == counted[0]
    called = sum(num_parameters[unit] for unit in record.first_calls())
    backward = sum(cost.backward_input + cost.backward_weight for cost in costs) - FLOPS_PER_PARAMETER * called
    assert backward == counted[1]
    # weights: every linear, once; a token takes two operations for each of its weights
    linear = sum(p.numel() for n, p in module.named_parameters() if p.dim() == 2 and not is_table(n))
    weight = sum(cost.backward_weight for cost in costs) - FLOPS_PER_PARAMETER * called
    assert weight == 2 * 48 * linear


def is_table(name: str) -> bool:
    """Embeddings, but for those that are the head's weight as well."""
    return any(part in name for part in ("wpe", "embed_tokens", "relative_attention_bias"))


def test_autocast_does_not_hide_weights() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def training_step(self, batch: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.blocks(batch).mean()

    module = build(Module)
    record = record_of(module, torch.randn(3, 8, dtype=torch.float32))
    assert all(call.weight_flops == call.flops > 0 for call in record.calls)


def stacked(num_blocks: int = 6) -> tuple[StepRecord, dict[str, int]]:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(24, 8)
            self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))
            self.head = nn.Linear(8, 24)

        def training_step(self, batch: Tensor) -> Tensor:
            return next_token_loss(self.head(self.blocks(self.embedding(batch))), batch)

    module = build(Module)
    units = discover_units(module)
    record = record_of(module, torch.randint(0, 24, (3, 6)))
    return record, {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}


def units_of(partition: Partition) -> list[list[str]]:
    return [partition.units_of_stage(stage) for stage in range(partition.num_stages)]


def test_a_rank_that_is_three_times_as_fast_gets_three_times_as_much() -> None:
    record, num_parameters = stacked()
    equal = {unit: UnitCost(1.0, 1.0, 1.0) for unit in record.first_calls()}
    partition = partition_units(
        record, placement=Placement.interleaved(2), num_parameters=num_parameters, costs=equal, rank_speeds=[3.0, 1.0]
    )
    assert [len(units) for units in units_of(partition)] == [6, 2]


def test_weights_of_units_move_the_cut() -> None:
    record, num_parameters = stacked()
    equal = {unit: UnitCost(1.0, 1.0, 1.0) for unit in record.first_calls()}
    partition = partition_units(
        record,
        placement=Placement.interleaved(2),
        num_parameters=num_parameters,
        costs=weighted(equal, {"blocks.*": 1.0, "head": 5.0}),
    )
    assert units_of(partition)[1] == ["blocks.5", "head"]


def test_a_memory_limit_moves_the_cut_and_one_that_is_too_small_is_refused() -> None:
    record, num_parameters = stacked()
    names = list(record.first_calls())
    equal = {unit: UnitCost(1.0, 1.0, 1.0) for unit in names}
    gib = float(2**30)

    def cut(limit: float) -> Partition:
        # the first stage holds two microbatches, the second one
        memory = UnitMemory(
            dict.fromkeys(names, gib), dict.fromkeys(names, gib), num_held=[2.0, 1.0], limit_bytes=[limit * gib] * 2
        )
        return partition_units(
            record, placement=Placement.interleaved(2), num_parameters=num_parameters, costs=equal, memory=memory
        )

    assert [len(units) for units in units_of(cut(20.0))] == [4, 4]
    assert [len(units) for units in units_of(cut(10.0))] == [3, 5]
    with pytest.raises(ConfigurationError, match="No cut of the model into 2 stages keeps the memory limits"):
        cut(9.5)


def test_wrong_weights_and_speeds_are_named() -> None:
    record, num_parameters = stacked()
    placement, costs = Placement.interleaved(2), estimate_unit_costs(record, num_parameters)
    with pytest.raises(ConfigurationError, match="'layers\\.\\*', but no unit .* embedding, blocks.0"):
        weighted(costs, {"layers.*": 2.0})
    with pytest.raises(ConfigurationError, match=r"unit_weights\['head'\]=0 must be a positive number"):
        weighted(costs, {"head": 0})
    with pytest.raises(ConfigurationError, match=r"rank_speeds=\[1\.0\] must have .* each of the 2 pipeline ranks"):
        partition_units(record, placement=placement, num_parameters=num_parameters, rank_speeds=[1.0])


def test_measured_times_are_shared_out_among_units_and_add_up_again() -> None:
    record, num_parameters = stacked()
    costs = estimate_unit_costs(record, num_parameters)
    partition = partition_units(record, placement=Placement.interleaved(3), num_parameters=num_parameters)
    measured = StageCosts([1.0, 2.0, 3.5], [2.0, 1.5, 4.0], [0.5, 0.25, 0.75])
    found = calibrated(costs, measured, units_of(partition))
    again = stage_costs(found, partition.stage_of_unit, [1.0] * 3)
    for part in ("forward", "backward_input", "backward_weight"):
        assert getattr(again, part) == pytest.approx(getattr(measured, part))
    blocks = [found[f"blocks.{index}"].total for index in range(6)]
    assert blocks[0] == pytest.approx(blocks[1])  # same stage, same unit
    with pytest.raises(
        ConfigurationError, match="do not include blocks.4, head: they come from stages with other units"
    ):
        calibrated(costs, measured, [[*units_of(partition)[0]], units_of(partition)[1], ["blocks.5"]])
