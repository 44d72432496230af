"""Sharded units in what surrounds them: deferred weight gradients, dropout, copies, recomputation, dry runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from tensor_models import BATCH, LENGTH, WIDTH, GatedUnit, ViewedAttention, hidden, make
from tensor_run import outcome
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from wrong_models import WRONG

from lightning_pp.errors import SplitError
from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.fakes.fake_mode import FakeValueMode
from lightning_pp.tensor import TensorParallelUnits, part_of, whole_of


def sharded(unit: nn.Module, *args: Any, plan: Any = "auto", **kwargs: Any) -> TensorParallelUnits:
    """Cuts ``unit``, by the name "unit", over all ranks."""
    assert dist.group.WORLD is not None
    units = TensorParallelUnits(nn.ModuleDict({"unit": unit}), {"unit": unit}, plan, dist.group.WORLD)
    units.observe("unit", args or (hidden(),), kwargs)
    units.shard()
    return units


def error_of(unit: nn.Module, units: TensorParallelUnits, wanted: nn.Module) -> float:
    """The largest difference of gradients of parameters."""
    assert dist.group.WORLD is not None
    largest = 0.0
    for (name, parameter), alone in zip(unit.named_parameters(), wanted.parameters(), strict=True):
        grad, part = parameter.grad, units.parts.get(f"unit.{name}")
        assert grad is not None and alone.grad is not None, name
        grad = grad if part is None else whole_of(grad, part, dist.group.WORLD)
        largest = max(largest, (grad - alone.grad).abs().max().item())
    return largest


def deferred(name: str) -> tuple[int, int, float]:
    unit, args, kwargs = make(name)
    alone = copy.deepcopy(unit)
    outcome(alone, args, kwargs)
    units = sharded(unit, *args, **kwargs)
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        with collect_weight_gradients(queue):
            outcome(unit, args, kwargs)
        matrices = [each for each in unit.parameters() if each.dim() == 2 and each.grad is None]
        num_waiting = len(queue)
        queue.run()
    return num_waiting, len(matrices), error_of(unit, units, alone)


def test_weight_gradients_wait_as_those_of_whole_weights_do(pool: WorkerPool) -> None:
    for name, num_matrices in (("viewed", 4), ("gpt2", 4), ("llama", 7), ("encoder_layer", 4)):
        for num_waiting, num_without_grad, error in pool.run(deferred, name, process_group=True):
            assert num_waiting == num_without_grad == num_matrices
            assert error < 1e-9


def checkpointed(name: str) -> float:
    unit, args, kwargs = make(name)
    alone = copy.deepcopy(unit)
    outcome(alone, args, kwargs)
    units = sharded(unit, *args, **kwargs)

    class Recomputed(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(unit, *args, use_reentrant=False, **kwargs)

    outcome(Recomputed(), args, kwargs)
    return error_of(unit, units, alone)


def test_recomputed_units(pool: WorkerPool) -> None:
    for error in pool.run(checkpointed, "block", process_group=True):
        assert error < 1e-9


class Dropouts(nn.Module):
    """Draws inside the sharded region, and outside of it before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5)
        h = nn.functional.dropout(self.up(x), 0.5)
        return nn.functional.dropout(self.down(h), 0.5)


def masks(again: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    unit = Dropouts().double()
    with torch.no_grad():  # what is not dropped is not zero
        unit.up.weight.zero_()
        unit.up.bias.fill_(1.0)
        unit.down.weight.fill_(1.0)
    units = sharded(unit)
    kept: list[Tensor] = []
    unit.down.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach().clone()))
    units.check_next_calls()
    torch.manual_seed(3)
    output = unit(torch.ones(BATCH, LENGTH, WIDTH, dtype=torch.float64))
    inner = kept[-1]
    if again:
        torch.manual_seed(3)
        assert torch.equal(output, unit(torch.ones(BATCH, LENGTH, WIDTH, dtype=torch.float64)))
    with torch._C.DisableTorchFunction():
        return inner.as_subclass(Tensor) != 0, output == 0, torch.rand(5), output


def test_dropout_draws_other_masks_on_each_rank_inside_and_the_same_outside(pool: WorkerPool) -> None:
    (first, dropped, after, output), (second, dropped_too, after_too, output_too) = pool.run(
        masks, True, process_group=True
    )
    assert first.shape == second.shape == (BATCH, LENGTH, 2 * WIDTH)
    assert 0.4 < (first == second).double().mean() < 0.6
    assert torch.equal(dropped, dropped_too) and torch.equal(after, after_too) and torch.equal(output, output_too)


def attention_dropout() -> tuple[Tensor, Tensor]:
    unit = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.4, batch_first=True).double()
    units = sharded(unit)
    units.check_next_calls()
    torch.manual_seed(3)
    output = unit(hidden())
    return output.detach(), torch.rand(5)


def test_attention_with_dropout_is_checked_without_it(pool: WorkerPool) -> None:
    (first, after), (second, after_too) = pool.run(attention_dropout, process_group=True)
    assert torch.equal(first, second) and torch.equal(after, after_too)


def parts_of_meta() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        unit = GatedUnit().double()
    units = sharded(unit)
    for name, parameter in unit.named_parameters():
        assert parameter.is_meta
        assert f"unit.{name}" not in units.parts or parameter.shape == units.parts[f"unit.{name}"].local_shape
    torch.manual_seed(0)
    whole = GatedUnit().double()
    unit.to_empty(device="cpu")
    wanted = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in unit.named_parameters():
            part = units.parts.get(f"unit.{name}")
            parameter.copy_(wanted[name] if part is None else part_of(wanted[name], part))
    units.check_next_calls()
    assert torch.allclose(unit(hidden()), whole(hidden()), rtol=0, atol=1e-12)
    return {name: tuple(each.shape) for name, each in unit.named_parameters()}


def test_parameters_without_memory_are_cut_before_they_are_made(pool: WorkerPool) -> None:
    for shapes in pool.run(parts_of_meta, process_group=True):
        assert shapes == {
            "scale": (),
            "up.weight": (2 * WIDTH, WIDTH),
            "down.weight": (WIDTH, WIDTH),
            "down.bias": (WIDTH,),
        }


def dry_run() -> tuple[int, ...]:
    unit, args, _ = make("viewed")
    units = sharded(unit)
    units.check_next_calls()
    before = {name: parameter.clone() for name, parameter in unit.named_parameters()}
    mode = FakeValueMode()
    if dist.get_rank() == 0:  # alone: nothing is communicated
        with mode:
            fakes = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in unit.named_parameters()}
            x = torch.empty(args[0].shape, dtype=args[0].dtype, requires_grad=True)
        output = torch.func.functional_call(unit, fakes, (x,))
        torch.autograd.grad(output.sum(), x)
        assert output.shape == args[0].shape
    for name, parameter in unit.named_parameters():
        assert torch.equal(parameter, before[name])
    outcome(unit, args, {})  # the check is still to come
    return tuple(unit.attn.qkv.weight.shape)


def test_a_dry_run_communicates_nothing(pool: WorkerPool) -> None:
    assert pool.run(dry_run, process_group=True) == [(3 * WIDTH // 2, WIDTH)] * 2


def copied() -> float:
    unit, args, kwargs = make("block")
    alone = copy.deepcopy(unit)
    units = sharded(unit)
    another = copy.deepcopy(unit)
    with torch.no_grad():
        for parameter in another.parameters():
            parameter.mul_(2)
        for parameter in alone.parameters():
            parameter.mul_(2)
    outcome(alone, args, kwargs)
    outcome(another, args, kwargs)
    assert all(parameter.grad is None for parameter in unit.parameters())
    return error_of(another, units, alone)


def test_a_copy_runs_on_parameters_of_its_own(pool: WorkerPool) -> None:
    for error in pool.run(copied, process_group=True):
        assert error < 1e-8


def tied() -> tuple[set[str], bool]:
    first, second = nn.Linear(WIDTH, WIDTH), ViewedAttention()
    second.out.weight = first.weight
    model = nn.ModuleDict({"a": nn.Sequential(first, nn.ReLU(), nn.Linear(WIDTH, WIDTH)), "b": second}).double()
    assert dist.group.WORLD is not None
    units = TensorParallelUnits(model, dict(model.items()), "auto", dist.group.WORLD)
    for name in model:
        units.observe(name, (hidden(),), {})
    wanted = [unit(hidden()) for unit in model.values()]
    units.shard()
    units.check_next_calls()
    given = [unit(hidden()) for unit in model.values()]
    same = all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(wanted, given, strict=True))
    return set(units.parts), same


def test_a_parameter_of_two_units_stays_whole(pool: WorkerPool) -> None:
    for parts, same in pool.run(tied, process_group=True):
        assert "a.0.weight" not in parts and "b.out.weight" not in parts
        assert same


def kept_bytes(sequence_parallel: bool) -> int:
    """What autograd keeps of a block, parameters aside, each memory once."""
    unit, args, kwargs = make("viewed")
    assert dist.group.WORLD is not None
    model = nn.ModuleDict({"unit": unit})
    units = TensorParallelUnits(
        model, dict(model.items()), "auto", dist.group.WORLD, sequence_parallel=sequence_parallel
    )
    units.observe("unit", args, kwargs)
    units.shard()
    parameters = {each.untyped_storage().data_ptr() for each in unit.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = unit(hidden().requires_grad_())
    assert output.shape == (BATCH, LENGTH, WIDTH)
    return sum(kept.values())


def test_sequence_parallel_keeps_fewer_bytes(pool: WorkerPool) -> None:
    whole, parts = (pool.run(kept_bytes, value, process_group=True)[0] for value in (False, True))
    # the sum between attention and MLP is what its norm keeps: a half of it here
    assert parts <= whole - BATCH * LENGTH * WIDTH * 8 // 2


def checked_in(dtype: torch.dtype, autocast: bool) -> dict[str, bool]:
    """Whether units pass the check in a precision, and a wrong one does not."""
    passed = {}
    for name in ("block", "llama", "encoder_layer", "gpt2", "t5", "vit", "wrong"):
        if name == "wrong":
            torch.manual_seed(0)
            unit, args, kwargs = WRONG["unseen"][0](), (hidden(),), {}
        else:
            unit, args, kwargs = make(name)
        unit = unit.to(dtype)
        args, kwargs = map_leaves(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
            (args, kwargs),
        )
        units = sharded(unit, *args, **kwargs)
        units.check_next_calls()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            try:
                unit(*args, **kwargs)
                passed[name] = True
            except SplitError:
                passed[name] = False
    return passed


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_the_check_knows_the_precision_of_a_unit(dtype: torch.dtype, autocast: bool, pool: WorkerPool) -> None:
    for passed in pool.run(checked_in, dtype, autocast, process_group=True):
        assert passed == {name: name != "wrong" for name in passed}
