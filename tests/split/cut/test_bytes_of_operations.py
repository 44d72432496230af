"""What operations move to and from memory, and the time that this takes, against counts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from one_process import record_of
from torch import Tensor, nn

from lightning_pp.split.cut.unit_costs import FLOPS_PER_PARAMETER, estimate_unit_costs
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.unit_calls.units import discover_units

WORDS, WIDTH, WIDE, ROWS = 40, 8, 32, 15  # rows of a microbatch: 3 samples of 5
FLOAT, LONG = 4, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDE, bias=False), nn.GELU()])
        self.head = nn.Linear(WIDE, WORDS, bias=False)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.embedding(batch)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden.transpose(0, 1))  # a view
        return F.cross_entropy(logits.reshape(ROWS, WORDS), batch.flatten())


@pytest.fixture(scope="module")
def recorded() -> tuple[StepRecord, dict[str, int]]:
    module = Net()
    units = discover_units(module, ["embedding", "blocks.*", "head"])
    record = record_of(module, torch.randint(0, WORDS, (3, 5)), units=["embedding", "blocks.*", "head"])
    return record, {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}


def test_bytes_are_those_of_the_tensors_that_are_read_and_written(recorded: tuple[StepRecord, dict[str, int]]) -> None:
    record, num_parameters = recorded
    slow = 1e6  # so many FLOPs in the time of a byte that all time is that of bytes
    costs = estimate_unit_costs(record, num_parameters, slow)
    narrow, wide, logits = (FLOAT * ROWS * width for width in (WIDTH, WIDE, WORDS))
    table, head = FLOAT * WORDS * WIDTH, FLOAT * WORDS * WIDE
    first = FLOAT * WIDTH * WIDE
    assert costs["embedding"].forward / slow == 2 * narrow + LONG * ROWS, "rows are read and written, not the table"
    # zeros and the rows in it; what is there, that, and the sum of both
    assert costs["embedding"].backward_input / slow == 4 * table + 2 * narrow
    norm = 2 * narrow + 2 * FLOAT * WIDTH + 2 * FLOAT * ROWS  # with means and deviations
    assert costs["blocks.0"].forward / slow == norm
    assert costs["blocks.1"].forward / slow == narrow + first + wide
    assert costs["blocks.1"].backward_input / slow == narrow + first + wide
    by_parameters = FLOPS_PER_PARAMETER * WIDTH * WIDE
    assert (costs["blocks.1"].backward_weight - by_parameters) / slow == narrow + wide + 2 * first
    # with the code around it: the activation; a copy of what is transposed; the loss, which reads a number of each row
    by_hand = 2 * wide + (2 * wide) + (wide + head + logits) + 2 * logits + 2 * LONG * ROWS + 2 * FLOAT
    assert costs["head"].forward / slow == by_hand


def test_an_operation_takes_the_longer_of_computing_and_of_moving(recorded: tuple[StepRecord, dict[str, int]]) -> None:
    record, num_parameters = recorded
    flops = 2 * ROWS * WIDTH * WIDE
    moved = FLOAT * (ROWS * WIDTH + WIDTH * WIDE + ROWS * WIDE)
    for flops_per_byte in (0.0, 0.5, 1.0, 2.0, 10.0):
        costs = estimate_unit_costs(record, num_parameters, flops_per_byte)
        assert costs["blocks.1"].forward == max(flops, flops_per_byte * moved)
        assert costs["embedding"].forward == flops_per_byte * ROWS * (2 * FLOAT * WIDTH + LONG)
    assert flops / moved < 10.0, "at the last one bytes count"
    by_flops = estimate_unit_costs(record, num_parameters)
    assert (by_flops["blocks.1"].forward, by_flops["embedding"].forward) == (flops, 0.0)


def test_what_runs_again_is_moved_again(recorded: tuple[StepRecord, dict[str, int]]) -> None:
    record, num_parameters = recorded
    before = estimate_unit_costs(record, num_parameters, 10.0)["blocks.0"]
    record.recomputed_units = frozenset({"blocks.0"})
    try:
        after = estimate_unit_costs(record, num_parameters, 10.0)["blocks.0"]
    finally:
        record.recomputed_units = frozenset()
    assert after.backward_input == before.backward_input + before.forward
