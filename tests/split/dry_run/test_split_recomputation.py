"""Units that are run again in backward: gradients, how often they run, what they hold, what is refused."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import architectures
import pytest
import torch
from model_parts import WIDTH, Architecture, Block, doubled, next_token_loss, tokens_of
from one_process import TOLERANCE, OneProcessPipeline, build, compare, gradient_error, run_whole
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import check_activation_checkpointing, recomputation_of
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.split.memory.estimate import MemoryEstimate, estimate_memory

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
WEIGHTS = [0.25, 0.5]


def checkpointed(name: str, policy: Any = None, *, splits_backward: bool = True) -> tuple[OneProcessPipeline, Any]:
    batches = architectures.batches_of(name, (3, 3))
    pipeline = OneProcessPipeline(architectures.ARCHITECTURES[name][0], batches[0], 3, splits_backward=splits_backward)
    for stage in pipeline.stages:
        stage.runner.recomputation = Recomputation(stage.units, policy)
    return pipeline, batches


@pytest.mark.by_day(4)
@pytest.mark.parametrize(
    ("name", "splits_backward", "policy"),
    [
        ("residual_mlp", True, None),
        ("residual_mlp", True, PRODUCTS),
        ("residual_mlp", False, PRODUCTS),
        ("recurrent", True, None),
        ("structured", False, None),
        ("structured", True, PRODUCTS),
        ("frozen_trunk", True, None),
    ],
)
def test_gradients_are_the_same(name: str, splits_backward: bool, policy: Any) -> None:
    pipeline, batches = checkpointed(name, policy, splits_backward=splits_backward)
    expected = run_whole(build(architectures.ARCHITECTURES[name][0]), batches, WEIGHTS)
    assert gradient_error(pipeline.run(batches, WEIGHTS), expected) < TOLERANCE


class Densely(nn.Module):
    """Reads the sum of what was collected before it and adds its own; counts what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, collected: list[Tensor], state: dict[str, Any]) -> Tensor:
        found = sum(collected, torch.zeros_like(x)) / (1 + len(state["inner"]["names"]))
        output: Tensor = torch.tanh(self.linear(x + found))
        collected.append(output)
        state["inner"]["names"].append(f"block {len(collected)}")
        return output


class DenselyConnected(Architecture):
    """Blocks that hand each other a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Densely() for _ in range(5))

    def training_step(self, batch: Tensor) -> Tensor:
        collected: list[Tensor] = []
        state: dict[str, Any] = {"inner": {"names": []}}
        x = batch
        for block in self.blocks:
            x = block(x, collected, state)
        assert state["inner"]["names"] == [f"block {number}" for number in range(1, 6)]
        return x.square().mean()


@pytest.mark.by_day(2)
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("runs_again", [False, True])
def test_units_run_again_with_the_lists_that_they_were_given(num_stages: int, runs_again: bool) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, WIDTH, dtype=torch.float64) for _ in range(2)]
    compare(DenselyConnected, batches, num_stages, splits_backward=True, runs_again=runs_again)


class Noisy(Architecture):
    """Dropout in every block."""

    class NoisyBlock(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.blocks = nn.ModuleList(self.NoisyBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 24)

    def training_step(self, batch: Any) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(x), batch)


def test_each_unit_runs_again_once_with_the_same_random_numbers() -> None:
    torch.manual_seed(7)
    batches = [tokens_of(3), tokens_of(2)]
    plain = OneProcessPipeline(Noisy, batches[0], 2, splits_backward=True).run(batches, WEIGHTS)
    pipeline = OneProcessPipeline(Noisy, batches[0], 2, splits_backward=True)
    runs: Counter[str] = Counter()
    for stage in pipeline.stages:
        stage.runner.recomputation = Recomputation([f"blocks.{index}" for index in range(4)])
        for name, unit in stage.units.items():
            inner = next(iter(unit.children()), None)
            if name.startswith("blocks") and name in pipeline.split.partition.units_of_stage(stage.number):
                assert inner is not None
                inner.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    found = pipeline.run(batches, WEIGHTS)
    assert gradient_error(found, plain) == 0
    assert runs == {f"blocks.{index}": 2 * len(batches) for index in range(4)}


def test_products_that_are_saved_do_not_run_again() -> None:
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in PRODUCTS
            return func(*args, **(kwargs or {}))

    def num_products(policy: Any) -> int:
        pipeline, batches = checkpointed("residual_mlp", policy)
        pipeline.plans(batches[0])
        with Count() as count:
            pipeline.run(batches[:1], WEIGHTS[:1])
        return count.products

    assert num_products(PRODUCTS) < num_products(None)


def wide_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves products with more columns than rows in the weight, and whatever drew random numbers."""
    is_wide = operation in PRODUCTS and args[-1].shape[0] <= args[-1].shape[1]
    is_random = torch.Tag.nondeterministic_seeded in operation.tags
    return CheckpointPolicy.MUST_SAVE if is_wide or is_random else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", ["residual_mlp", "separate_lists", "encoder_decoder", "mixture_of_experts", "noisy"])
@pytest.mark.parametrize("policy", [True, PRODUCTS, wide_products], ids=["inputs only", "products", "function"])
def test_held_memory_is_the_estimate(name: str, policy: Any) -> None:
    """What the policy saves is held from F on, beside the inputs; less than without recomputation."""
    torch.manual_seed(7)
    architecture, make_batch = (Noisy, tokens_of) if name == "noisy" else architectures.ARCHITECTURES[name]
    batch = doubled(make_batch(40))

    def pipeline_of(value: Any) -> tuple[OneProcessPipeline, MemoryEstimate]:
        made = OneProcessPipeline(architecture, batch, 3, splits_backward=True, activation_checkpointing=value)
        split = made.split
        return made, estimate_memory(split.record, split.partition, split.placement, split.parameter_sizes)

    pipeline, estimated = pipeline_of(policy)
    plain, inputs_only = pipeline_of(False)[1], pipeline_of(True)[1]
    watched = pipeline.watched_forwards(batch, threshold=100)
    for found, least, (_, _, held) in zip(estimated.stages, inputs_only.stages, watched, strict=True):
        assert found.held_after_forward_bytes == pytest.approx(held, rel=0.1, abs=1000)
        assert found.held_after_forward_bytes >= least.held_after_forward_bytes
        assert found.recomputed_bytes <= least.recomputed_bytes
    if policy is not True:
        assert estimated.stages[1].held_after_forward_bytes > inputs_only.stages[1].held_after_forward_bytes
    assert inputs_only.stages[1].held_after_forward_bytes < plain.stages[1].held_after_forward_bytes


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", ["residual_mlp", "separate_lists", "structured", "mixture_of_experts"])
@pytest.mark.parametrize("policy", [True, PRODUCTS, wide_products], ids=["inputs only", "products", "function"])
def test_what_runs_again_is_in_the_cost_of_the_input_gradient(name: str, policy: Any) -> None:
    batch = architectures.batches_of(name)[0]

    def flops(value: Any) -> tuple[float, float]:
        """Estimated and counted."""
        pipeline = OneProcessPipeline(architectures.ARCHITECTURES[name][0], batch, 2, activation_checkpointing=value)
        for stage in pipeline.stages:
            stage.runner.recomputation = pipeline.split.recomputation or Recomputation(())
        with FlopCounterMode(display=False) as counter:
            pipeline.run([batch], [1.0])
        costs = pipeline.split.partition.unit_costs.values()
        return sum(cost.total for cost in costs), counter.get_total_flops()

    (estimated, counted), (estimated_without, counted_without) = flops(policy), flops(False)
    assert estimated - estimated_without == counted - counted_without
    assert policy is not True or counted > counted_without


def resolved(name: str, value: Any) -> Recomputation | None:
    batch = architectures.batches_of(name)[0]
    pipeline = OneProcessPipeline(architectures.ARCHITECTURES[name][0], batch, 2)
    record = pipeline.plans(batch)[0].record
    return recomputation_of(value, pipeline.split.module, pipeline.split.units, record)


def test_units_are_chosen() -> None:
    assert resolved("tied_by_hand", False) is None
    chosen = {
        key: resolved("tied_by_hand", value).units  # type: ignore[union-attr]
        for key, value in {"all": True, "some": ["blocks.[01]"], "one": "blocks.2", "policy": PRODUCTS}.items()
    }
    assert chosen["all"] == chosen["policy"] == {name for name in chosen["all"] if name.startswith("blocks.")} != set()
    assert chosen["some"] == {"blocks.0", "blocks.1"} and chosen["one"] == {"blocks.2"}


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'block\.\*' matches none of the .* closest names are: .*blocks\.0"):
        resolved("tied_by_hand", ["block.*"])
    with pytest.raises(ConfigurationError, match=re.escape("The model already checkpoints the unit")):
        resolved("checkpointed", True)
    for value in (3, ["blocks.0", 3], None):
        with pytest.raises(ConfigurationError, match="must be True, 'auto', a list of names or patterns of units"):
            check_activation_checkpointing(value)  # type: ignore[arg-type]
