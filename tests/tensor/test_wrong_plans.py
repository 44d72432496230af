"""Plans that are wrong are refused before anything is updated, with the unit and the numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from tensor_models import hidden, make
from tensor_run import compare
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from wrong_models import WRONG

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.tensor.plans import check_sizes
from lightning_pp.tensor.units import TensorParallelUnits


def refusal(unit: nn.Module, plan: Any, observes: bool = True) -> str:
    """What is said against the plan, at set-up or in the first call; empty if nothing is."""
    assert dist.group.WORLD is not None
    try:
        units = TensorParallelUnits(nn.ModuleDict({"unit": unit}), {"unit": unit}, plan, dist.group.WORLD)
        if observes:
            units.observe("unit", (hidden(),), {})
        units.shard()
        units.check_next_calls()
        unit(hidden().requires_grad_()).sum().backward()
    except (ConfigurationError, SplitError) as error:
        return str(error)
    return ""


def refusals(observes: bool) -> dict[str, str]:
    said = {}
    for name, (make_unit, plan, _) in WRONG.items():
        torch.manual_seed(0)
        said[name] = refusal(make_unit().double(), plan, observes)
    return said


def test_each_is_refused_at_set_up_or_in_the_first_batch(pool: WorkerPool) -> None:
    for said in pool.run(refusals, True, process_group=True):
        for name, (_, _, wanted) in WRONG.items():
            assert re.search(wanted, said[name]), (name, said[name])
            assert "'unit'" in said[name], (name, said[name])


def test_each_is_refused_in_the_first_batch_without_a_trace(pool: WorkerPool) -> None:
    for said in pool.run(refusals, False, process_group=True):
        for name, message in said.items():
            assert message.startswith("Unit 'unit' ("), (name, message)


def auto_refusals() -> dict[str, str]:
    said = {}
    for name, (make_unit, _, _) in WRONG.items():
        torch.manual_seed(0)
        said[name] = refusal(make_unit().double(), "auto")
    return said


def test_auto_leaves_whole_what_it_cannot_cut(pool: WorkerPool) -> None:
    # of code in which no function is seen, only the check can know
    unseen = {"unseen", "backward"}
    for said in pool.run(auto_refusals, process_group=True):
        assert {name for name, message in said.items() if message} == unseen


def test_a_fused_projection_cut_across_its_parts_is_refused(pool: WorkerPool) -> None:
    plan = {"*.qkv": "colwise", "*.out": "rowwise"}
    for said in pool.run(refused_block, plan, process_group=True):
        assert said == (
            "Unit 'unit' (Block) computes something else on 2 tensor ranks than on one: split takes [0, 16) of a "
            "sharded dimension of 48. '*.qkv' cuts attn.qkv.weight, attn.qkv.bias; '*.out' cuts attn.out.weight. Set "
            "the matrices that cause this to 'replicate' in tensor_parallel_plan. Nothing was updated."
        )


def refused_block(plan: Any) -> str:
    return refusal(make("block")[0], plan, observes=False)


def test_rows_without_columns_are_right(pool: WorkerPool) -> None:
    for outcome in pool.run(compare, "block", {"*.mlp.2": "rowwise"}, process_group=True):
        assert set(outcome["parts"]) == {"unit.mlp.2.weight"}
        assert outcome["error"] < 1e-9


MODEL = nn.ModuleDict({"up": nn.Linear(6, 9), "down": nn.Linear(9, 6)})


def test_sizes_that_do_not_divide_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_sizes(MODEL, {"up": "colwise", "down": "rowwise"}, 2)
    assert str(caught.value) == (
        "tensor_parallel_size=2 does not divide what tensor_parallel_plan cuts: up.weight has 9 output features "
        "(colwise by 'up'); down.weight has 9 input features (rowwise by 'down'). Use a size that divides them, or "
        "'replicate' for these modules."
    )
    check_sizes(MODEL, {"up": "colwise", "down": "rowwise"}, 3)
    check_sizes(MODEL, "auto", 2)


def test_patterns_and_styles_that_are_none() -> None:
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_plan\['upp'\] fits no weight .* up.weight, down.w"):
        check_sizes(MODEL, {"upp": "colwise"}, 3)
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_plan\['up'\] is 'columns'. Use 'colwise'"):
        check_sizes(MODEL, {"up": "columns"}, 3)
    with pytest.raises(ConfigurationError, match="SequenceParallel"):
        check_sizes(MODEL, {"up": SequenceParallel()}, 3)
    with pytest.raises(ConfigurationError, match="tensor_parallel_size=2 does not divide"):
        check_sizes(MODEL, {"up": ColwiseParallel(), "down": RowwiseParallel()}, 2)
