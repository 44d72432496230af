"""Sharded units against an unsharded model that sees the data of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deferred_model import WIDTH, DeferredLinear, Model, make_microbatches, make_model
from pool import WorkerPool
from sharding_run import (
    ALL_FORWARD_FIRST,
    ONE_BY_ONE,
    V_PLACEMENT,
    ZERO_BUBBLE,
    CollectiveCounter,
    Runner,
    full_gradients,
    largest_error,
    mean_gradients,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from lightning_pp.checkpoint.ownership.rank_part import shard_like
from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding._torch_private import dtensor_of
from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.units.flat import gradient_like

TOLERANCE = 1e-12
ORDERS = (ZERO_BUBBLE, ALL_FORWARD_FIRST, ONE_BY_ONE, V_PLACEMENT)


def make_mesh(num_replicas: int = 1) -> DeviceMesh:
    size = dist.get_world_size()
    if num_replicas == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (num_replicas, size // num_replicas), mesh_dim_names=("replicate", "shard"))


def freeze_some(model: Model) -> None:
    model.blocks[0].requires_grad_(False)
    for block in model.blocks[1:]:
        block.norm.requires_grad_(False)
        block.up.weight.requires_grad_(False)


def num_microbatches(order: str) -> int:
    return sum(action[0] == "F" and not action.endswith("'") for action in order.split())


def reference_gradients(order: str, num_batches: int, frozen: bool, **options: Any) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of the gradients of plain models, each with one rank's data, one backward at a time."""
    replicas = []
    for rank in range(dist.get_world_size()):
        model = make_model(**options)
        if frozen:
            freeze_some(model)
        count = num_microbatches(order)
        for batch in range(num_batches):
            for tokens in make_microbatches(rank, count, seed=100 + 10 * batch):
                Runner(model).run("F0 I0 W0", [tokens])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        replicas.append(model)
    return mean_gradients(replicas)


def gradient_error(
    order: str,
    reshard_after_use: bool,
    num_batches: int = 1,
    num_replicas: int = 1,
    frozen: bool = False,
    **options: Any,
) -> float:
    expected = reference_gradients(order, num_batches, frozen, **options)
    model = make_model(**options)
    if frozen:
        freeze_some(model)
    units = ShardedUnits(model.units(), mesh=make_mesh(num_replicas), reshard_after_use=reshard_after_use)
    for batch in range(num_batches):
        units.begin_step()
        Runner(model).run(order, make_microbatches(dist.get_rank(), num_microbatches(order), seed=100 + 10 * batch))
        assert not reshard_after_use or all(isinstance(parameter, DTensor) for parameter in model.parameters())
        units.end_of_batch(reduce=batch == num_batches - 1)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return largest_error(full_gradients(model), expected)


def gradient_errors(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Several cases in one run of the pool, each with and without freeing."""
    return {
        f"{case} {reshard}": gradient_error(**{"order": ZERO_BUBBLE, "reshard_after_use": reshard, **case})
        for case in cases
        for reshard in (False, True)
    }


def assert_exact(pool: WorkerPool, cases: list[dict[str, Any]], world_size: int) -> None:
    for errors in pool.run(gradient_errors, cases, world_size=world_size, process_group=True):
        assert {case: error for case, error in errors.items() if not error < TOLERANCE} == {}


def test_gradients_in_any_order(pool: WorkerPool) -> None:
    assert_exact(pool, [{"order": order} for order in ORDERS], 2)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "case",
    [
        {"num_batches": 3},
        {"checkpointing": "inside"},
        {"checkpointing": "around"},
        {"checkpointing": "to the end"},
        {"checkpointing": "reentrant"},
        {"frozen": True},
        {"tied": True},
        {"tied": True, "frozen": True, "checkpointing": "around", "num_batches": 2},
    ],
    ids=str,
)
def test_gradients_of_cases(pool: WorkerPool, case: dict[str, Any]) -> None:
    assert_exact(pool, [{"order": order, **case} for order in (ZERO_BUBBLE, V_PLACEMENT)], 2)


def test_gradients_on_four_ranks(pool: WorkerPool) -> None:
    """Sharded by four, 2 x 2, and replicated by four."""
    common = {"num_batches": 2, "tied": True}
    assert_exact(pool, [{"num_replicas": num_replicas, **common} for num_replicas in (1, 2, 4)], 4)


def test_gradients_on_one_rank(pool: WorkerPool) -> None:
    assert_exact(pool, [{}], 1)


def checkpointed_runs(where: str) -> list[int]:
    model = make_model(checkpointing=where)
    units = ShardedUnits(model.units(), mesh=make_mesh(), reshard_after_use=True)
    units.begin_step()
    Runner(model).run(ZERO_BUBBLE, make_microbatches(0, 4))
    units.end_of_batch(reduce=True)
    return [block.num_runs for block in model.blocks]


@pytest.mark.parametrize("where", ["inside", "around", "to the end", "reentrant"])
def test_checkpointed_blocks_run_twice(pool: WorkerPool, where: str) -> None:
    """Four microbatches, forward and recomputation; the second block is called twice in each."""
    assert pool.run(checkpointed_runs, where, world_size=2, process_group=True) == [[8, 16, 8]] * 2


# --------------------------------------------------------------------------- collectives


def collectives(order: str, reshard_after_use: bool, num_batches: int, num_replicas: int) -> list[dict[str, int]]:
    """Counts for each batch, and one more entry for the training step after them."""
    model = make_model(tied=True)
    units = ShardedUnits(model.units(), mesh=make_mesh(num_replicas), reshard_after_use=reshard_after_use)
    counts = []
    for batch in [*range(num_batches), num_batches - 1]:
        with CollectiveCounter() as collective:
            units.begin_step()
            Runner(model).run(order, make_microbatches(dist.get_rank(), num_microbatches(order)))
            units.end_of_batch(reduce=batch == num_batches - 1)
        counts.append(dict(collective.counts))
    return counts


def test_collectives_when_parameters_stay(pool: WorkerPool) -> None:
    """Five groups (embed and head are one), of which one is never called; gathered once, reduced once per step."""
    counts = pool.run(collectives, ZERO_BUBBLE, False, 3, 1, world_size=2, process_group=True)[0]
    assert counts == [
        {"allgather_base": 4},
        {},
        {"reduce_scatter_base": 5},
        {"allgather_base": 4, "reduce_scatter_base": 5},
    ]


def test_collectives_when_parameters_are_freed(pool: WorkerPool) -> None:
    """A gather for each call of a unit, and for each of its backwards; the second block is called twice."""
    counts = pool.run(collectives, ZERO_BUBBLE, True, 2, 1, world_size=2, process_group=True)[0]
    num_forward = 4 * 6
    num_backward = 4 * 5  # nothing comes between the two calls of the second block
    assert counts[0] == {"allgather_base": num_forward + num_backward}
    assert counts[1] == {"allgather_base": num_forward + num_backward, "reduce_scatter_base": 5}


def test_collectives_of_hsdp(pool: WorkerPool) -> None:
    counts = pool.run(collectives, ZERO_BUBBLE, False, 1, 2, world_size=4, process_group=True)[0]
    assert counts[0] == {"allgather_base": 4, "reduce_scatter_base": 5, "allreduce": 5}


def test_no_collectives_on_one_rank(pool: WorkerPool) -> None:
    assert pool.run(collectives, ZERO_BUBBLE, True, 1, 1, world_size=1, process_group=True)[0] == [{}, {}]


def windows() -> tuple[dict[str, int], float]:
    """The program gathers and frees: one window over all forwards, one over all backwards."""
    expected = reference_gradients(ALL_FORWARD_FIRST, 1, False)
    model = make_model()
    units = ShardedUnits(model.units(), mesh=make_mesh(), reshard_after_use=True)
    used = [name for name in model.units() if name != "unused"]

    def free() -> None:
        for unit in used:
            units.reshard(unit)

    def gather() -> None:
        for unit in used:
            units.unshard(unit)

    def between() -> None:
        free()
        assert model.blocks[0].up.weight.to_local().shape[0] < 9
        gather()

    with CollectiveCounter() as collective:
        units.begin_step()
        gather()
        after: dict[str, Any] = {"F3": between, "I0": free, "W0": lambda: None}
        Runner(model).run(ALL_FORWARD_FIRST, make_microbatches(dist.get_rank(), 4), after)
        units.end_of_batch(reduce=True)
    return dict(collective.counts), largest_error(full_gradients(model), expected)


def test_windows_of_the_program(pool: WorkerPool) -> None:
    counts, error = pool.run(windows, world_size=2, process_group=True)[0]
    assert counts == {"allgather_base": 10, "reduce_scatter_base": 6}
    assert error < TOLERANCE


def reduced_early() -> float:
    """Units are reduced one by one while others still work."""
    order = "F0 F1 F0' F1' I1' I0' W1' W0' I0 I1 W1 W0"
    expected = reference_gradients(order, 1, False)
    model = make_model()
    units = ShardedUnits(model.units(), mesh=make_mesh())
    units.begin_step()

    def reduce_second_stage() -> None:
        units.reduce("head")
        units.reduce("blocks.2")
        assert isinstance(model.head.weight, DTensor)
        assert not isinstance(model.blocks[0].up.weight, DTensor)

    after = {"W0'": reduce_second_stage}
    Runner(model).run(order, make_microbatches(dist.get_rank(), 2), after)
    units.end_of_batch(reduce=True)
    return largest_error(full_gradients(model), expected)


def test_units_are_reduced_while_others_work(pool: WorkerPool) -> None:
    assert max(pool.run(reduced_early, world_size=2, process_group=True)) < TOLERANCE


def streams_of_fsdp2() -> list[str]:
    """Which streams FSDP2 has made for the units of a rank, once a batch has been run."""
    order = "F0 I0 W0"
    model = make_model()
    units = ShardedUnits(model.units(), mesh=make_mesh())
    units.begin_step()
    Runner(model).run(order, make_microbatches(dist.get_rank(), 1), {})
    units.end_of_batch(reduce=True)
    parts = [part for group in units._groups for part in group._leader._get_fsdp_state()._fsdp_param_groups]
    assert len(parts) > 3
    return [name for part in parts for name in vars(part.comm_ctx) if "stream" in name]


def test_units_take_none_of_the_few_streams_of_a_device(pool: WorkerPool) -> None:
    assert pool.run(streams_of_fsdp2, world_size=2, process_group=True) == [[], []]


# --------------------------------------------------------------------------- memory


class _MeasuredQueue(list[Any]):
    """Calls a function in the backward of each linear layer."""

    def __init__(self, measure: Callable[[], None]) -> None:
        super().__init__()
        self.measure = measure

    def append(self, item: Any) -> None:
        self.measure()
        super().append(item)


def gathered_bytes() -> list[tuple[int, int]]:
    """The largest number of gathered bytes in F and in I, and that after them, with and without freeing."""
    found = []
    for reshard_after_use in (True, False):
        model = make_model()
        units = ShardedUnits(model.units(), mesh=make_mesh(), reshard_after_use=reshard_after_use)
        gathered: list[nn.Parameter] = []
        largest = 0

        def measure(*_: Any) -> None:
            nonlocal largest
            gathered[:] = [p for name in units.names for p in units.accumulating(name)]  # noqa: B023
            largest = max(largest, sum(p.untyped_storage().nbytes() for p in gathered))  # noqa: B023

        for module in model.modules():
            module.register_forward_pre_hook(measure)
            if isinstance(module, DeferredLinear):
                module.queue = _MeasuredQueue(measure)
        units.begin_step()
        Runner(model).run("F0 I0", make_microbatches(0, 1))
        after = sum(p.untyped_storage().nbytes() for p in gathered)
        units.end_of_batch(reduce=True)
        assert sum(p.untyped_storage().nbytes() for p in gathered) == 0
        found.append((largest, after))
    return found


def test_one_unit_at_a_time_is_gathered(pool: WorkerPool) -> None:
    freed, kept = pool.run(gathered_bytes, world_size=2, process_group=True)[0]
    model = make_model()
    sizes = {name: sum(p.numel() * 8 for p in unit.parameters()) for name, unit in model.units().items()}
    padding = 8 * (WIDTH + 1)  # nine rows become ten, in a weight and a bias
    assert freed == (sizes["blocks.0"] + padding, 0)
    assert kept[0] == kept[1] > 3 * sizes["blocks.0"]


# --------------------------------------------------------------------------- awkward units


class _EditsItsInput(nn.Module):
    """Computes its weight from two parameters, edits its input in place, and returns it beside a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.linear(x * 0.7)
        x.mul_(1.5)
        return [x, y.view(-1, 2)[1:]]


class _ReturnsView(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).t()


class _PassesOn(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"same": x, "view": x[0], "weight": self.bias * 2, "sum": torch.tanh(super().forward(x - 0.1))}


def make_awkward() -> nn.ModuleDict:
    return nn.ModuleDict({"edit": _EditsItsInput(), "view": _ReturnsView(4, 4), "pass": _PassesOn(4, 4)}).double()


def awkward_step(units: nn.ModuleDict, leaf: torch.Tensor) -> torch.Tensor:
    h, part = units["edit"](leaf * 2)
    part += 0.5
    h = units["view"](h)
    h += 1
    h = units["view"](units["pass"](h)["sum"])
    h = units["pass"](h)["same"]
    outputs = units["pass"](h)
    outputs["same"] += 1
    h, last = units["edit"](outputs["sum"] + outputs["view"] + outputs["weight"])
    return (h * outputs["same"]).sum() + part.square().sum() + (last * part).sum()


def awkward(reshard_after_use: bool) -> list[float]:
    torch.manual_seed(0)
    plain, model = make_awkward(), make_awkward()
    model.load_state_dict(plain.state_dict())
    units = ShardedUnits(dict(model.items()), mesh=make_mesh(), reshard_after_use=reshard_after_use)
    leaves = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True)]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    units.begin_step()
    losses = [awkward_step(modules, leaf) for modules, leaf in zip((plain, model), leaves, strict=True)]
    for loss in losses:
        loss.backward()
    units.end_of_batch(reduce=True)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    leaf_error = (leaves[0].grad - leaves[1].grad).abs().max().item()
    return [(losses[0] - losses[1]).abs().item(), leaf_error, largest_error(full_gradients(model), gradients)]


@pytest.mark.parametrize("reshard_after_use", [False, True])
def test_awkward_units(pool: WorkerPool, reshard_after_use: bool) -> None:
    for errors in pool.run(awkward, reshard_after_use, world_size=2, process_group=True):
        assert max(errors) < TOLERANCE


def saved_during_accumulation() -> float:
    expected = reference_gradients(ONE_BY_ONE, 2, False)
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    units = ShardedUnits(model.units(), mesh=make_mesh())
    for batch in range(2):
        units.begin_step()
        Runner(model).run(ONE_BY_ONE, make_microbatches(dist.get_rank(), 4, seed=100 + 10 * batch))
        units.end_of_batch(reduce=batch == 1)
        if batch == 0:
            assert not isinstance(model.head.weight, DTensor)
            for name, value in model.state_dict().items():
                full = value.full_tensor() if isinstance(value, DTensor) else value
                assert "num_calls" in name or torch.equal(full, before[name])
            assert isinstance(model.head.weight, DTensor)
    return largest_error(full_gradients(model), expected)


def test_saving_during_accumulation(pool: WorkerPool) -> None:
    """A state dict is that of the sharded parameters, and the gradients accumulated so far survive it."""
    assert max(pool.run(saved_during_accumulation, world_size=2, process_group=True)) < TOLERANCE


# --------------------------------------------------------------------------- what ranks do differently


def skipping(skip_on_rank: dict[int, set[int]]) -> float:
    replicas = []
    for rank in range(2):
        replica = make_model()
        replica.skipped = skip_on_rank[rank]
        Runner(replica).run(ZERO_BUBBLE, make_microbatches(rank, 4))
        replicas.append(replica)
    expected = mean_gradients(replicas)
    model = make_model()
    model.skipped = skip_on_rank[dist.get_rank()]
    units = ShardedUnits(model.units(), mesh=make_mesh())
    units.begin_step()
    for unit in model.units():
        units.unshard(unit)
    Runner(model).run(ZERO_BUBBLE, make_microbatches(dist.get_rank(), 4))
    units.end_of_batch(reduce=True)
    return largest_error(full_gradients(model), expected)


@pytest.mark.parametrize("skip_on_rank", [{0: {1}, 1: set()}, {0: {0, 2}, 1: {1}}, {0: {1}, 1: {1}}], ids=str)
def test_ranks_that_call_other_units(pool: WorkerPool, skip_on_rank: dict[int, set[int]]) -> None:
    """Zero counts for a missing gradient, and None stays where no rank has one: as DDP and one device have it."""
    assert max(pool.run(skipping, skip_on_rank, world_size=2, process_group=True)) < TOLERANCE


# --------------------------------------------------------------------------- training


def trained(reshard_after_use: bool, num_steps: int) -> tuple[float, float]:
    """AdamW with evaluation between the steps; the errors of losses and of weights."""
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    plain = make_model(tied=True)
    model = make_model(tied=True)
    units = ShardedUnits(model.units(), mesh=make_mesh(), reshard_after_use=reshard_after_use)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.3) for m in (plain, model)]
    worst = 0.0
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for r in range(2):
            for tokens in make_microbatches(r, 4, seed=step):
                Runner(plain).run("F0 I0 W0", [tokens])
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= 8
        units.begin_step()
        Runner(model).run(ZERO_BUBBLE, make_microbatches(rank, 4, seed=step))
        units.end_of_batch(reduce=True)
        for optimizer in optimizers:
            optimizer.step()
        for m in (plain, model):
            m.eval()
        with torch.no_grad():
            tokens = make_microbatches(5, 1)[0]
            worst = max(worst, (plain(tokens) - model(tokens)).abs().item())
        units.reshard_all()
        for m in (plain, model):
            m.train()
    weights = dict(model.named_parameters())
    differences = [(weights[n].full_tensor() - p).abs().max().item() for n, p in plain.named_parameters()]
    buffers = dict(model.named_buffers())
    assert int(buffers["blocks.1.num_calls"]) == num_steps * 10
    return worst, max(differences)


@pytest.mark.parametrize("reshard_after_use", [False, True])
def test_training_and_evaluation(pool: WorkerPool, reshard_after_use: bool) -> None:
    for losses, weights in pool.run(trained, reshard_after_use, 3, world_size=2, process_group=True):
        assert losses < 1e-9
        assert weights < 1e-9


def unfrozen_later() -> list[float]:
    model = make_model()
    model.blocks[0].requires_grad_(False)
    units = ShardedUnits(model.units(), mesh=make_mesh())
    errors = []
    for frozen in (True, False):
        replicas = [make_model() for _ in range(2)]
        for rank, replica in enumerate(replicas):
            replica.blocks[0].requires_grad_(not frozen)
            Runner(replica).run(ZERO_BUBBLE, make_microbatches(rank, 4))
        model.blocks[0].requires_grad_(not frozen)
        model.zero_grad()
        units.begin_step()
        Runner(model).run(ZERO_BUBBLE, make_microbatches(dist.get_rank(), 4))
        units.end_of_batch(reduce=True)
        errors.append(largest_error(full_gradients(model), mean_gradients(replicas)))
    return errors


def test_freezing_may_change_between_steps(pool: WorkerPool) -> None:
    for errors in pool.run(unfrozen_later, world_size=2, process_group=True):
        assert max(errors) < TOLERANCE


# --------------------------------------------------------------------------- failures


class _InjectedError(Exception):
    pass


def abandoned(reshard_after_use: bool, action: str) -> float:
    expected = reference_gradients(ZERO_BUBBLE, 1, False)
    model = make_model()
    units = ShardedUnits(model.units(), mesh=make_mesh(), reshard_after_use=reshard_after_use)

    def fail() -> None:
        raise _InjectedError

    def fail_in_forward(*_: Any) -> None:
        if model.blocks[2].num_runs == 2:
            raise _InjectedError

    data = make_microbatches(dist.get_rank(), 4)
    units.begin_step()
    Runner(model).run(ZERO_BUBBLE, data)  # an accumulated batch goes with the failed one
    units.end_of_batch(reduce=False)
    units.begin_step()
    units.unshard("unused")
    model.blocks[2].num_runs = 0
    hook = model.blocks[2].norm.register_forward_hook(fail_in_forward) if action == "inside F" else None
    if action == "reduce":
        Runner(model).run(ZERO_BUBBLE, data)
        units.reduce("head")
        units.reduce("blocks.2")
    else:
        with pytest.raises(_InjectedError):
            Runner(model).run(ZERO_BUBBLE, data, {action: fail})
    if hook is not None:
        hook.remove()
    model.queue.clear()
    units.abandon_step()
    assert all(isinstance(parameter, DTensor) and parameter.grad is None for parameter in model.parameters())
    units.begin_step()
    Runner(model).run(ZERO_BUBBLE, data)
    units.end_of_batch(reduce=True)
    return largest_error(full_gradients(model), expected)


def all_abandoned() -> list[float]:
    return [
        abandoned(reshard, action) for reshard in (False, True) for action in ("F1", "I0", "W0", "inside F", "reduce")
    ]


def test_step_after_an_abandoned_one(pool: WorkerPool) -> None:
    for errors in pool.run(all_abandoned, world_size=2, process_group=True):
        assert max(errors) < TOLERANCE


def misused() -> None:
    model = make_model()
    units = ShardedUnits(model.units(), mesh=make_mesh())
    run = Runner(model).run
    data = make_microbatches(dist.get_rank(), 1)
    units.begin_step()
    with pytest.raises(RuntimeError, match="abandon_step"):
        units.begin_step()
    run("F0 I0 W0", data)
    units.reduce("head")
    with pytest.raises(RuntimeError, match="head was reduced already"):
        units.reduce("head")
    with pytest.raises(RuntimeError, match=r"\['head'\] were reduced in a batch that only accumulates"):
        units.end_of_batch(reduce=False)
    run("F0 I0 W0", data)
    with pytest.raises(RuntimeError, match=r"head\.\w+ got a gradient after its unit was reduced"):
        units.end_of_batch(reduce=True)
    units.abandon_step()
    with pytest.raises(ValueError, match="no unit 'tail' on this rank; it has embed, blocks.0"):
        units.reduce("tail")


def test_misuse_is_reported(pool: WorkerPool) -> None:
    pool.run(misused, world_size=2, process_group=True)


# --------------------------------------------------------------------------- precision


def low_precision(case: str, reshard_after_use: bool) -> float:
    """bf16 against plain models in bf16 whose gradients are fp32; the sum over two ranks is exact in either order."""
    half, single = torch.bfloat16, torch.float32
    stored = half if case == "bf16 parameters" else single
    replicas = []
    for rank in range(2):
        replica = make_model(stored).to(half)
        for parameter in replica.parameters():
            parameter.grad_dtype = single
        Runner(replica).run(ZERO_BUBBLE, make_microbatches(rank, 4))
        replicas.append(replica)
    expected = {name: None if g is None else g.to(stored) for name, g in mean_gradients(replicas).items()}
    model = make_model(stored)
    for block in model.blocks:
        block.scale = block.scale.to(half)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=None if case == "mixed" else single)
    units = ShardedUnits(model.units(), mesh=make_mesh(), reshard_after_use=reshard_after_use, mp_policy=policy)
    units.begin_step()
    Runner(model).run(ZERO_BUBBLE, make_microbatches(dist.get_rank(), 4))
    units.end_of_batch(reduce=True)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {stored}
    return largest_error(full_gradients(model), expected)


def all_low_precision() -> list[float]:
    cases = ("bf16 parameters", "mixed", "mixed, reduction in fp32")
    return [low_precision(case, reshard) for case in cases for reshard in (False, True)]


def test_low_precision_accumulates_and_reduces_in_fp32(pool: WorkerPool) -> None:
    assert pool.run(all_low_precision, world_size=2, process_group=True) == [[0.0] * 6] * 2


def casts() -> None:
    seen = []

    class Unit(nn.Linear):
        def forward(self, x: torch.Tensor, index: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append((x.dtype, index.dtype, scale.dtype))
            return {"y": super().forward(x) * scale, "index": index}

    unit = Unit(3, 3)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    units = ShardedUnits({"unit": unit}, mesh=make_mesh(), mp_policy=policy)
    outputs = unit(torch.ones(2, 3), torch.tensor([1]), scale=torch.ones(()))
    assert seen == [(torch.bfloat16, torch.int64, torch.bfloat16)]
    assert outputs["y"].dtype == torch.float32
    assert outputs["index"].dtype == torch.int64
    units.reshard_all()


def test_inputs_and_outputs_are_cast(pool: WorkerPool) -> None:
    pool.run(casts, world_size=2, process_group=True)


# --------------------------------------------------------------------------- odd parameters


class _Odd(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(2.0))
        self.table = nn.Parameter(torch.arange(12).view(4, 3), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(3, 5).t())
        self.direct = nn.Parameter(torch.ones(3))
        self.tiny = nn.Parameter(torch.ones(1, 3))
        self.norm = nn.Identity() if mixed else nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) * self.gate * self.table[1]
        return y @ self.weight.t() + (self.tiny * self.direct.to(x.dtype)).sum()


def odd_parameters(mixed: bool) -> list[str]:
    plain, unit = _Odd(mixed), _Odd(mixed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32) if mixed else None
    units = ShardedUnits({"odd": unit}, mesh=make_mesh(), replicated=[unit.direct], mp_policy=policy)
    left_whole = {id(parameter) for parameter in units.replicated}
    names = [name for name, parameter in unit.named_parameters() if id(parameter) in left_whole]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for module in (plain, unit):
        if module is unit:
            units.begin_step()
        module(x).square().sum().backward()
    units.end_of_batch(reduce=True)
    assert mixed or torch.equal(plain.norm.running_mean, unit.norm.running_mean)
    for name, parameter in plain.named_parameters():
        gradient = dict(unit.named_parameters())[name].grad
        if name == "table":
            assert gradient is None
            continue
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(full, parameter.grad, rtol=0.05 if mixed else 1e-6, atol=0.3 if mixed else 1e-5)
    return names


def test_odd_parameters(pool: WorkerPool) -> None:
    """Scalars, integers, views, a first dimension smaller than the mesh, and one left out."""
    for mixed in (False, True):
        names = pool.run(odd_parameters, mixed, world_size=2, process_group=True)
        assert names == [["gate", "table", "direct"]] * 2


def bad_units() -> None:
    mesh = make_mesh()
    outer = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="unit outer contains unit inner"):
        ShardedUnits({"outer": outer, "inner": outer[0]}, mesh=mesh)
    with pytest.raises(ConfigurationError, match=r"mixed\.1\.weight.*Cast them to one dtype"):
        ShardedUnits({"mixed": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())}, mesh=mesh)
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    units = ShardedUnits({"meta": meta}, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"meta\.weight is still on the meta device"):
        units.unshard("meta")
    with pytest.raises(RuntimeError, match=r"meta\.weight is still on the meta device"):
        meta(torch.ones(2))
    meta.to_empty(device="cpu")
    meta(torch.ones(2))


def test_bad_units_are_refused(pool: WorkerPool) -> None:
    pool.run(bad_units, world_size=2, process_group=True)


def paused() -> dict[str, int]:
    model = make_model()
    units = ShardedUnits(model.units(), mesh=make_mesh())
    fakes = make_model()
    with CollectiveCounter() as collective, units.paused():
        unit = model.blocks[0]
        saved = dict(unit.up._parameters)
        for real, fake in zip(unit.modules(), fakes.blocks[0].modules(), strict=True):
            for name, parameter in fake._parameters.items():
                real._parameters[name] = parameter
        unit({"hidden": torch.ones(2, 2, 6, dtype=torch.float64)})
        unit.up._parameters.update(saved)
    return dict(collective.counts)


def test_paused_calls_do_not_gather(pool: WorkerPool) -> None:
    assert pool.run(paused, world_size=2, process_group=True) == [{}, {}]


def devices_of_offloaded_parts() -> list[str]:
    """In a worker: where a shard on the host, its gradient and its optimizer state lie if the mesh is of devices."""
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cuda", [dist.get_rank()], _init_backend=False)
    shard = nn.Parameter(dtensor_of(torch.ones(4), mesh, [Shard(0)], torch.Size([4]), (1,)))
    shard.grad = gradient_like(shard, torch.full((4,), 2.0))
    state = shard_like({"step": torch.tensor(1.0), "exp_avg": torch.full((4,), 3.0)}, shard)
    found = [shard.grad, state["exp_avg"]]
    assert [part.to_local().tolist() for part in found] == [[2.0] * 4, [3.0] * 4]
    return [str(part.device) for part in [shard, *found]]


def test_parts_of_a_shard_on_the_host_stay_there(pool: WorkerPool) -> None:
    assert pool.run(devices_of_offloaded_parts, world_size=1) == [["cpu"] * 3]
