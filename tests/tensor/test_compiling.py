"""Units that are compiled on two ranks compute what they compute on one device, uncompiled, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from tensor_models import WIDTH
from tensor_run import compare, outcome
from torch import Tensor, nn

from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.runtime.split_backward.deferral import collect_weight_gradients, weight_gradients_deferrable
from lightning_pp.runtime.split_backward.queue import WeightGradientQueue
from lightning_pp.tensor.aside import FLOPS_PER_BYTE
from lightning_pp.tensor.units import TensorParallelUnits

BY_DAY, OWN = ["block"], ["encoder_layer", "viewed", "gated", "decoder_layer", "multihead"]
OF_TRANSFORMERS = ["llama", "llama-eager", "llama_one_key_head", "gpt2", "gpt2-eager", "vit", "phi3"]


def compare_compiled(names: Sequence[str], sequence_parallel: bool, backend: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        torch._dynamo.reset()
        found[name] = compare(name, sequence_parallel=sequence_parallel, backend=backend)
    return found


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        pytest.param(BY_DAY, "aot_eager", id="by-day"),
        pytest.param(OWN, "aot_eager", id="own-and-torch", marks=pytest.mark.nightly),
        pytest.param(OF_TRANSFORMERS, "aot_eager", id="transformers", marks=pytest.mark.nightly),
        # not Llama, whose norm computes in float32: inductor sums it in another order on one device too
        pytest.param(["block", "gpt2"], "inductor", id="inductor", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_compiled_units(names: list[str], backend: str, sequence_parallel: bool, pool: WorkerPool) -> None:
    args = names, sequence_parallel, backend
    for outcomes in pool.run(compare_compiled, *args, process_group=True, timeout=280):
        for name, found in outcomes.items():
            assert (found["num_graphs"], found["uncompiled"]) == (1, {}), name
            assert found["error"] < 1e-9, name


def cut_units(units: dict[str, nn.Module], x: Tensor) -> CompiledUnits:
    """``units``, each of which takes such inputs as ``x``, on this rank's parts, to be compiled."""
    assert dist.group.WORLD is not None
    cut = TensorParallelUnits(nn.ModuleDict(units), units, "auto", dist.group.WORLD)
    for name in units:
        cut.observe(name, (x,), {})
    cut.shard()
    assert cut.parts
    torch._dynamo.reset()
    compiled = CompiledUnits(units, {"backend": "aot_eager"})
    compiled.attach()
    return compiled


def cut_unit(unit: nn.Module, x: Tensor) -> CompiledUnits:
    return cut_units({"unit": unit}, x)


def two_layers(*between: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), *between, nn.Linear(4 * WIDTH, WIDTH)).double()


def difference_with_dropout() -> tuple[float, bool, dict[str, str]]:
    """Of results and input gradients from one device with the same seed, and whether the generators are the same."""
    unit, x = two_layers(nn.Dropout(0.5)), torch.randn(4, 6, WIDTH, dtype=torch.float64)
    alone = copy.deepcopy(unit)
    compiled = cut_unit(unit, x)
    torch.manual_seed(3)
    wanted = outcome(alone, (x,), {})
    state = torch.get_rng_state()
    torch.manual_seed(3)
    got = outcome(unit, (x,), {})
    pairs = zip([*wanted[0], *wanted[1]], [*got[0], *got[1]], strict=True)
    same = torch.equal(state, torch.get_rng_state())
    return max((a - b).abs().max().item() for a, b in pairs), same, compiled.uncompiled()


def test_dropout_on_parts_draws_what_one_device_draws(pool: WorkerPool) -> None:
    for difference, same_generators, uncompiled in pool.run(difference_with_dropout, process_group=True, timeout=120):
        assert difference < 1e-9 and same_generators and not uncompiled


def without_gradients(flops_per_byte: float) -> tuple[list[int], float]:
    """Matrices of two compiled units that have no gradient after I, and the largest error after W."""
    units, x = {name: two_layers(nn.GELU()) for name in ("first", "second")}, torch.randn(4, 6, WIDTH).double()
    alone = copy.deepcopy(units)
    alone["second"](alone["first"](x)).sum().backward()
    cut_units(units, x)
    assert dist.group.WORLD is not None
    FLOPS_PER_BYTE[dist.group.WORLD] = flops_per_byte
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        result = units["second"](units["first"](x.requires_grad_()))
        with collect_weight_gradients(queue):
            result.sum().backward()
    matrices = {name: [unit[0].weight, unit[-1].weight] for name, unit in units.items()}
    waiting = [sum(weight.grad is None for weight in matrices[name]) for name in matrices]
    queue.run()
    errors = []
    for name, (up, down) in matrices.items():
        for weight, whole, dim in ((up, alone[name][0].weight, 0), (down, alone[name][-1].weight, 1)):
            wanted = whole.grad.chunk(2, dim)[dist.get_rank()]
            errors.append((weight.grad - wanted).abs().max().item())
    return waiting, max(errors)


def test_weight_gradients_run_beside_sums_of_the_unit_before(pool: WorkerPool) -> None:
    for rate, waiting in ((0.0, [2, 2]), (1e9, [2, 0])):
        for found, error in pool.run(without_gradients, rate, process_group=True, timeout=120):
            assert found == waiting and error < 1e-9


class Branches(nn.Module):
    """Branches by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if x.detach().sum() > 0 else x - self.layers(x)


def run_branches() -> tuple[float, dict[str, str]]:
    unit, x = Branches(), torch.randn(4, 6, WIDTH, dtype=torch.float64)
    alone = copy.deepcopy(unit)
    compiled = cut_unit(unit, x)
    return (unit(x) - alone(x)).abs().max().item(), compiled.uncompiled()


def test_a_unit_that_is_no_single_graph_runs_uncompiled_and_says_why(pool: WorkerPool) -> None:
    for difference, uncompiled in pool.run(run_branches, process_group=True, timeout=120):
        assert difference < 1e-9
        assert list(uncompiled) == ["unit"] and "Unsupported: " in uncompiled["unit"]


def run_sizes() -> tuple[float, dict[str, str]]:
    """Runs with sequences of several lengths; the largest difference."""
    unit = two_layers(nn.GELU())
    inputs = [torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (6, 3, 9, 6)]
    alone = copy.deepcopy(unit)
    compiled = cut_unit(unit, inputs[0])
    return max((unit(x) - alone(x)).abs().max().item() for x in inputs), compiled.uncompiled()


def test_inputs_of_several_sizes(pool: WorkerPool) -> None:
    for difference, uncompiled in pool.run(run_sizes, process_group=True, timeout=120):
        assert difference < 1e-9 and not uncompiled


def run_switched_off() -> None:
    unit, x = two_layers(nn.GELU()), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    cut_unit(unit, x)
    with torch.compiler.set_stance("force_eager"):
        unit(x)


def test_stand_ins_are_never_computed_with(pool: WorkerPool) -> None:
    for message in pool.refusals("SplitError", run_switched_off, process_group=True, timeout=120):
        assert "torch.compile did not compile unit 'unit'" in message
