"""Plans of pipelines whose ranks share matrices: what units wait for, over which links, and what is refused."""

from __future__ import annotations

import pytest
import torch
from planned import NUM_LAYERS, planned

from lightning_pp.cli.problems import UserError
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.schedule import StageCosts

# replicas of one stage, and links whose latency alone counts
TWO = ["trainer.devices=2", "strategy.pipeline_parallel_size=1", "strategy.schedule=1f1b", "schedules=[1f1b]"]
SPEED = ["peak_tflops=0.001", "link_gb_per_s=1e9", "node_link_gb_per_s=1e9"]
TENSOR = [*TWO, *SPEED, "strategy.tensor_parallel_size=2"]


def costs(*overrides: str) -> tuple[float, float, float]:
    """F, I and W of the only stage, milliseconds."""
    plan, _ = planned(*overrides)
    found: StageCosts = plan.shown.cut.costs.per_stage(1)
    return found.forward[0], found.backward_input[0], found.backward_weight[0]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_blocks_wait_for_two_sums_in_forward_and_in_backward(checkpointing: bool) -> None:
    run = [*TENSOR, f"strategy.activation_checkpointing={str(checkpointing).lower()}"]
    at_once = costs(*run, "node_link_latency_us=0")
    late = costs(*run, "node_link_latency_us=1000")
    # what runs again ends before the second sum of a block; one more of the embedding, and of the head's input
    sums = 2 * NUM_LAYERS + 1
    waits = (sums, sums + (NUM_LAYERS if checkpointing else 0), -sums)  # weight gradients run beside the sums in I
    assert [b - a for a, b in zip(at_once, late, strict=True)] == pytest.approx(waits, abs=1e-3)
    later = costs(*run, "node_link_latency_us=3e9")
    assert later[2] == 0.0 and later[1] == pytest.approx(at_once[1] + waits[1] * 3e6)


def test_groups_within_a_node_use_its_links() -> None:
    latencies = ["node_link_latency_us=0", "link_latency_us=5000"]
    inside, across = (costs(*TENSOR, *latencies, f"devices_per_node={number}") for number in (2, 1))
    assert across[0] - inside[0] == pytest.approx((2 * NUM_LAYERS + 1) * 5.0, abs=1e-3)


def test_products_that_are_cut_take_half_as_long() -> None:
    plan, text = planned(*TENSOR, "node_link_latency_us=0")
    whole, _ = planned(*TWO, *SPEED, "strategy.data_parallel_size=2")
    split = plan.shown.cut.split
    assert split.on_parts is not None
    flops = {call.unit: call.flops for call in split.record.calls}
    blocks = {name: number for name, number in flops.items() if name.startswith("blocks.")}
    assert {call.flops for call in split.counted.record.calls if call.unit in blocks} == {
        number / 2 for number in blocks.values()
    }
    # the head is cut as well, along the vocabulary
    saved = sum(flops.values()) / 2 / (1e9 * 0.4) * 1e3  # 0.001 TFLOP/s, of which 0.4 are reached
    assert whole.shown.cut.costs.per_stage(1).forward[0] - plan.shown.cut.costs.per_stage(1).forward[0] == (
        pytest.approx(saved, rel=1e-3)
    )
    assert "neighbouring global ranks share the matrices of a stage (0 to 1, 2 to 3, ...)" in text
    assert "of the parameters whole on all 2 ranks: position.weight" in text


def test_optimizers_that_need_whole_matrices_are_refused_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteGPT, "configure_optimizers", lambda self: torch.optim.Adafactor(self.parameters()))
    with pytest.raises(UserError, match=r"Adafactor may compute an update from a whole matrix.*embedding\.weight and"):
        planned(*TENSOR)
    planned(*TWO, *SPEED, "strategy.data_parallel_size=2")


def test_units_that_run_alone_are_refused() -> None:
    with pytest.raises(UserError, match="Units are measured whole, but strategy.tensor_parallel_size=2 cuts"):
        planned(*TENSOR, "measure=true")


def test_a_part_of_a_message_crosses_and_the_gather_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["trainer.devices=4", "strategy.pipeline_parallel_size=2", "strategy.schedule=1f1b", "schedules=[1f1b]"]
    run += [*SPEED, "strategy.tensor_parallel_size=2", "node_link_latency_us=3000", "link_latency_us=0"]
    least = "lightning_pp.split.record.step_record.LEAST_BYTES_IN_PARTS"
    found = []
    for number in (0, 1 << 40):
        monkeypatch.setattr(least, number)
        plan, _ = planned(*run)
        (crossing,) = plan.shown.cut.summary.crossings
        found.append((plan.shown.cut.costs.per_stage(2), crossing, [rank.buffers for rank in plan.shown.memory]))
    (parts, in_parts, memory), (whole, at_once, memory_of_whole) = found
    assert in_parts.forward_bytes == in_parts.gradient_bytes == in_parts.joined_bytes == at_once.forward_bytes / 2 > 0
    assert at_once.joined_bytes == 0
    more = [(a - b) for a, b in zip(parts.forward, whole.forward, strict=True)]
    assert more == pytest.approx([0.0, 3.0], abs=1e-3)
    more = [(a - b) for a, b in zip(parts.backward_input, whole.backward_input, strict=True)]
    assert more == pytest.approx([3.0, 0.0], abs=1e-3)
    assert all(0 < a < b for a, b in zip(memory, memory_of_whole, strict=True))
