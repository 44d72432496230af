"""Sharded units in what surrounds them: deferred weight gradients, dropout, copies, recomputation, dry runs."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta
from pathlib import Path
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
from lightning_pp.tensor.aside import FLOPS_PER_BYTE
from lightning_pp.tensor.parts import part_of, whole_of
from lightning_pp.tensor.units import TensorParallelUnits


def sharded(
    unit: nn.Module, *args: Any, plan: Any = "auto", sequence_parallel: bool = False, **kwargs: Any
) -> TensorParallelUnits:
    """Cuts ``unit``, by the name "unit", over all ranks."""
    assert dist.group.WORLD is not None
    units = TensorParallelUnits(
        nn.ModuleDict({"unit": unit}), {"unit": unit}, plan, dist.group.WORLD, sequence_parallel=sequence_parallel
    )
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


def deferred(name: str, sequence_parallel: bool) -> list[int]:
    """How many weight gradients wait, for each of some rates of computing to communication."""
    unit, args, kwargs = make(name)
    alone = copy.deepcopy(unit)
    outcome(alone, args, kwargs)
    units = sharded(unit, *args, sequence_parallel=sequence_parallel, **kwargs)
    assert dist.group.WORLD is not None
    waiting = []
    for flops_per_byte in (0.0, 1.0, 1.5, 3.0, 1e9):
        FLOPS_PER_BYTE[dist.group.WORLD] = flops_per_byte
        unit.zero_grad()
        queue = WeightGradientQueue()
        with weight_gradients_deferrable():
            with collect_weight_gradients(queue):
                outcome(unit, args, kwargs)
            waiting.append(sum(each.dim() == 2 and each.grad is None for each in unit.parameters()))
            assert len(queue) == waiting[-1]
            queue.run()
        assert error_of(unit, units, alone) < 1e-9
    return waiting


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
def test_weight_gradients_wait_or_run_beside_communication(sequence_parallel: bool, pool: WorkerPool) -> None:
    for name, num_matrices in (("viewed", 4), ("gpt2", 4), ("llama", 7), ("encoder_layer", 4)):
        waiting, others = pool.run(deferred, name, sequence_parallel, process_group=True)
        assert waiting == others
        assert waiting == sorted(waiting, reverse=True) and (waiting[0], waiting[-1]) == (num_matrices, 0)
        assert any(0 < number < num_matrices for number in waiting), (name, waiting)


def beside_a_late_rank(file: Path) -> tuple[bool, bool]:
    """The second rank begins its backward once the first one has weight gradients, in the midst of its own."""
    unit = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)).double()
    sharded(unit)
    assert dist.group.WORLD is not None
    FLOPS_PER_BYTE[dist.group.WORLD] = 1e9
    store, has_ended = dist.FileStore(str(file), 2), threading.Event()

    def tell() -> None:
        while unit[0].weight.grad is None and not has_ended.is_set():
            time.sleep(0.001)
        store.set("added", str(has_ended.is_set()))

    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        output = unit(hidden().requires_grad_())
        if dist.get_rank() == 0:
            watcher = threading.Thread(target=tell)
            watcher.start()
        else:
            store.wait(["added"], timedelta(seconds=60))
        with collect_weight_gradients(queue):
            output.sum().backward()
    has_ended.set()
    return store.get("added") == b"False", len(queue) == 0


def test_weight_gradients_are_added_before_a_sum_has_ended(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(beside_a_late_rank, tmp_path / "store", process_group=True) == [(True, True)] * 2


def accumulated(flops_per_byte: float, is_for_w: bool) -> list[Tensor]:
    """Gradients of three microbatches, whose W run after all I."""
    unit, args, kwargs = make("llama")
    sharded(unit, *args, **kwargs)
    assert dist.group.WORLD is not None
    FLOPS_PER_BYTE[dist.group.WORLD] = flops_per_byte
    queues = [WeightGradientQueue() for _ in range(3)]
    with weight_gradients_deferrable():
        for queue in queues:
            queue.is_for_w = is_for_w
            args = map_leaves(lambda leaf: leaf * 1.5, args)
            with collect_weight_gradients(queue):
                outcome(unit, args, kwargs)
        for queue in queues:
            queue.run()
    return [each.grad for each in unit.parameters() if each.grad is not None]


def test_sums_are_the_same_whatever_runs_beside_communication(pool: WorkerPool) -> None:
    wanted = pool.run(accumulated, 0.0, True, process_group=True)
    for rate, is_for_w in ((1.5, True), (3.0, True), (1e9, True), (3.0, False)):
        for found, whole in zip(pool.run(accumulated, rate, is_for_w, process_group=True), wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def of_full_backward(name: str) -> tuple[int, int]:
    """How many weight gradients wait after the backward of a B, and how many there are."""
    unit, args, kwargs = make(name)
    sharded(unit, *args, **kwargs)
    assert dist.group.WORLD is not None
    FLOPS_PER_BYTE[dist.group.WORLD] = 0.0
    queue = WeightGradientQueue()
    queue.is_for_w = False
    with weight_gradients_deferrable(), collect_weight_gradients(queue):
        outcome(unit, args, kwargs)
    return len(queue), sum(each.dim() == 2 for each in unit.parameters())


def test_without_a_w_nothing_is_kept_that_no_communication_needs(pool: WorkerPool) -> None:
    assert pool.run(of_full_backward, "llama", process_group=True) == [(0, 7)] * 2


def measured() -> float:
    unit, args, kwargs = make("block")
    sharded(unit, *args, **kwargs)
    assert dist.group.WORLD is not None
    with weight_gradients_deferrable(), collect_weight_gradients(WeightGradientQueue()):
        outcome(unit, args, kwargs)
    return FLOPS_PER_BYTE[dist.group.WORLD]


def test_ranks_agree_on_how_much_runs_beside_communication(pool: WorkerPool) -> None:
    first, second = pool.run(measured, process_group=True)
    assert first == second > 0


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
