"""Low precision, against plain FSDP2 with the same policy and against Lightning's own on one device."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from parity_run import QUIET, whole_weights
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy

WIDTH, VOCABULARY, LENGTH, NUM_BLOCKS = 16, 40, 6, 4
NUM_BATCHES, BATCH_SIZE, NUM_MICROBATCHES = 3, 8, 4


class Block(nn.Module):
    """Attention with rotary positions and an additive mask, both made by the code outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.seen: set[tuple[str, torch.dtype]] = set()

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        self.seen |= {("x", x.dtype), ("angles", angles.dtype), ("mask", mask.dtype), ("tokens", tokens.dtype)}
        assert mask.min() == torch.finfo(torch.float32).min  # would be -inf in bfloat16, and NaN where all is masked
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = rotated(q, angles) @ rotated(k, angles).mT / math.sqrt(WIDTH) + mask
        x = x + self.out(scores.softmax(-1).to(v.dtype) @ v)
        return x + self.down(F.gelu(self.up(x)))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class Model(Descends):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight
        self.sums: set[torch.dtype] = set()  # of gradients to which more batches are to be added

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        angles = torch.arange(LENGTH)[:, None] * 1000.0 ** -torch.linspace(0, 1, WIDTH // 2)
        blocked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float32).masked_fill(blocked, torch.finfo(torch.float32).min)
        mask[-1] = torch.finfo(torch.float32).min  # a row of padding
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.float(), mask, tokens)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())
        assert loss.dtype == torch.float32 or not torch.is_autocast_enabled("cpu")
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.fit_loop._should_accumulate():
            self.sums |= {p.grad.dtype for p in self.parameters() if p.grad is not None}


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(VOCABULARY, (NUM_BATCHES * BATCH_SIZE, LENGTH), generator=generator))


def fitted(
    strategy: dict[str, Any] | None, precision: Any, replicas: int = 1, num_ranks: int = 1, **options: Any
) -> dict[str, Any]:
    """Trains; returns weights and what blocks were given."""
    module = Model(options.pop("tied", False))
    arguments = {"plugins": precision} if not isinstance(precision, str) else {"precision": precision}
    trainer = L.Trainer(
        devices=num_ranks,
        strategy="auto" if strategy is None else PipelineParallelStrategy(**strategy, check_first_batches=False),
        max_epochs=1,
        use_distributed_sampler=False,
        **arguments,
        **QUIET,
        **options,
    )
    data = dataset()
    if replicas > 1:  # replicas take every other sample of each batch
        replica = int(os.environ["RANK"]) % replicas
        data = TensorDataset(data.tensors[0][replica::replicas])
    trainer.fit(module, DataLoader(data, batch_size=BATCH_SIZE // replicas))
    seen = set().union(*(block.seen for block in module.blocks))
    gradients = {str(p.grad.dtype) for p in module.parameters() if p.grad is not None}
    return {
        "weights": whole_weights(module),
        "seen": seen,
        "gradients": gradients,
        "sums": module.sums,
        "losses": trainer.logged_metrics,
    }


def plain_fsdp(replicas: int) -> dict[str, Tensor]:
    """The same training by plain FSDP2 under the same autocast, sums over microbatches in float32."""
    module = Model()
    module.log = lambda *_: None  # type: ignore[method-assign,assignment]
    mesh = init_device_mesh("cpu", (replicas,))
    # FSDP2 would cast masks and angles too, which is not what is asked for
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for unit in (module.embedding, *module.blocks, module.head):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = module.configure_optimizers()
    module.forward = module.training_step  # type: ignore[method-assign,assignment]
    replica = torch.distributed.get_rank() % replicas
    tokens = dataset().tensors[0][replica::replicas]
    for batch in tokens.split(BATCH_SIZE // replicas):
        optimizer.zero_grad()
        for index, microbatch in enumerate(batch.chunk(NUM_MICROBATCHES)):
            module.set_requires_gradient_sync(index == NUM_MICROBATCHES - 1)  # type: ignore[operator]
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                loss = module((microbatch,), 0)
            (loss / NUM_MICROBATCHES).backward()
        optimizer.step()
    return whole_weights(module)


def layout(pipeline: int, replicas: int = 1, schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": replicas,
        "schedule": schedule,
        "num_microbatches": NUM_MICROBATCHES,
        **({"device_memory_gib": 16.0} if pipeline == replicas == 1 else {}),  # not plain training
        **options,
    }


def whole(results: list[Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for result in results:
        found.update(result["weights"])
    return found


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of updated weights, relative to the largest update of a parameter."""
    before = whole_weights(Model())
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - value.double()).abs().max() / (value - before[name]).abs().max())
        for name, value in expected.items()
    )


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("pipeline", "replicas", "options"),
    [
        (2, 1, {"schedule": "zb_v"}),
        (1, 2, {"sharding": "full_shard"}),
        pytest.param(2, 2, {"schedule": "zb_h1", "sharding": "shard_grad_op"}, marks=pytest.mark.nightly),
        pytest.param(1, 1, {}, marks=pytest.mark.nightly),
        pytest.param(2, 1, {}, marks=pytest.mark.nightly),
        pytest.param(2, 2, {"sharding": "replicate"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bf16_mixed_is_that_of_plain_fsdp(
    pool: WorkerPool, pipeline: int, replicas: int, options: dict[str, Any]
) -> None:
    expected = pool.run(plain_fsdp, replicas, world_size=replicas, process_group=True)[0]
    strategy = layout(pipeline, replicas, **options)
    world_size = pipeline * replicas
    results = pool.run(fitted, strategy, "bf16-mixed", replicas, world_size, world_size=world_size, timeout=120)
    found = whole(results)
    assert all(weight.dtype == torch.float32 for weight in found.values())
    # The last bits of float32 sums differ: deferred products are of other shapes, and losses have weights of their own.
    assert largest_difference(found, expected) < 2e-3
    for result in results:
        assert result["seen"] <= {
            *(("x", dtype) for dtype in (torch.bfloat16,)),
            ("angles", torch.float32),
            ("mask", torch.float32),
            ("tokens", torch.int64),
        }
        assert result["gradients"] == {"torch.float32"}


def test_bf16_mixed_does_not_depend_on_the_layout(pool: WorkerPool) -> None:
    one = whole(pool.run(fitted, layout(1), "bf16-mixed", world_size=1))
    two = whole(pool.run(fitted, layout(2), "bf16-mixed", 1, 2, world_size=2))
    assert largest_difference(two, one) == 0


@pytest.mark.nightly
def test_bf16_mixed_with_tied_embeddings_does_not_depend_on_the_layout(pool: WorkerPool) -> None:
    """Both units cast the one parameter; its gradients are summed in float32, in another order."""
    one = whole(pool.run(fitted, layout(1), "bf16-mixed", world_size=1, tied=True))
    two = pool.run(fitted, layout(2), "bf16-mixed", 1, 2, world_size=2, tied=True)
    assert "embedding.weight" in two[0]["weights"] and "embedding.weight" in two[1]["weights"]
    assert largest_difference(whole(two), one) < 2e-3


def test_bf16_mixed_is_close_to_one_device(pool: WorkerPool) -> None:
    """There embeddings and norms are computed in float32: what differs is the rounding of their weights."""
    expected = fitted(None, "bf16-mixed")
    results = pool.run(fitted, layout(2), "bf16-mixed", 1, 2, world_size=2)
    assert largest_difference(whole(results), expected["weights"]) < 0.1
    for result in results:
        torch.testing.assert_close(result["losses"]["loss"], expected["losses"]["loss"], rtol=2e-3, atol=0)


class NormFirst(Descends):
    """Its first unit norms the batch itself, in float32, with numbers that bfloat16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.second = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.first[0].weight.uniform_(0.5, 1.5)
            self.first[0].bias.uniform_(-1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.second(self.first(batch))).float().square().mean()


def fit_norm_first(
    strategy: Any,
    replicas: int = 1,
    num_ranks: int = 1,
    module: type[L.LightningModule] = NormFirst,
    precision: Any = "bf16-mixed",
) -> dict[str, Tensor]:
    """In a worker or here: weights after three batches."""
    trainer = L.Trainer(
        devices=num_ranks, strategy=strategy, precision=precision, max_epochs=1,
        use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    samples = torch.randn(NUM_BATCHES * BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(4))
    if replicas > 1:
        samples = samples[int(os.environ["RANK"]) % replicas :: replicas]
    fitted_module = module()
    trainer.fit(fitted_module, DataLoader(samples, batch_size=BATCH_SIZE // replicas))
    return whole_weights(fitted_module)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("pipeline", "replicas", "options"),
    [(2, 1, {"schedule": "zb_h1"}), (2, 2, {"sharding": "full_shard"}), (1, 2, {"sharding": "replicate"})],
    ids=str,
)
def test_a_norm_of_the_batch_is_that_of_one_device(
    pool: WorkerPool, pipeline: int, replicas: int, options: dict[str, Any]
) -> None:
    """A CPU has no norm of float32 with weights of bfloat16; on one device both are float32 under autocast."""
    expected, before, found = fit_norm_first("auto"), whole_weights(NormFirst()), dict[str, Tensor]()
    strategy = PipelineParallelStrategy(**layout(pipeline, replicas, **options), check_first_batches=False)
    world_size = pipeline * replicas
    for weights in pool.run(fit_norm_first, strategy, replicas, world_size, world_size=world_size, timeout=120):
        found.update(weights)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        # what is left: gradients of products, which one device rounds to bfloat16
        assert (found[name] - weight).abs().max() < 0.01 * (weight - before[name]).abs().max(), name


class NormsOfASample(NormFirst):
    """Norms whose statistics are of one sample, with and without weights of their own."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 8, 1))
        self.second = nn.Sequential(nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv1d(8, 8, 1, bias=False), nn.InstanceNorm1d(8))
        self.head = nn.Sequential(nn.Conv1d(8, 4, 1), nn.GroupNorm(1, 4), nn.Flatten(), nn.Linear(WIDTH, 1))
        with torch.no_grad():
            for norm in (self.first[1], self.second[0], self.head[1]):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.uniform_(-1, 1)


@pytest.mark.parametrize(("precision", "most"), [("32-true", 1e-4), ("bf16-mixed", 0.1)])
def test_norms_of_a_sample_are_those_of_one_device(pool: WorkerPool, precision: Any, most: float) -> None:
    """In ``bf16-mixed`` weights of norms between layers are rounded; one device computes these norms in float32."""
    expected = fit_norm_first("auto", module=NormsOfASample, precision=precision)
    before = whole_weights(NormsOfASample())
    found = []
    for pipeline in (1, 2):
        strategy = PipelineParallelStrategy(**layout(pipeline, schedule="zb_h1"), check_first_batches=False)
        ranks = pool.run(
            fit_norm_first, strategy, 1, pipeline, NormsOfASample, precision, world_size=pipeline, timeout=120
        )
        found.append({name: weight for weights in ranks for name, weight in weights.items()})
    one, two = found
    assert one.keys() == two.keys() == expected.keys()
    for name, weight in expected.items():
        moved = (weight - before[name]).abs().max()
        assert moved > 0, name
        assert (one[name] - two[name]).abs().max() < 1e-4 * moved, name
        assert (two[name] - weight).abs().max() < most * moved, name


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("pipeline", "replicas", "sharding"), [(2, 1, "shard_grad_op"), (1, 2, "replicate")])
def test_bf16_true_accumulates_in_float32(pool: WorkerPool, pipeline: int, replicas: int, sharding: str) -> None:
    """Eight batches' sums of a gradient in bfloat16 would lose what is below a 256th of them."""
    strategy = layout(pipeline, replicas, sharding=sharding)
    results = pool.run(fitted, strategy, "bf16-true", replicas, 2, world_size=2, accumulate_grad_batches=NUM_BATCHES)
    found = whole(results)
    assert all(weight.dtype == torch.bfloat16 for weight in found.values())
    for result in results:
        assert result["gradients"] == {"torch.bfloat16"} and result["sums"] == {torch.float32}
    # one optimizer step; its gradient, by microbatches in bfloat16, summed in float64
    module = Model().bfloat16()
    module.log = lambda *_: None  # type: ignore[method-assign,assignment]
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
    pieces = [
        piece
        for batch in dataset().tensors[0].split(BATCH_SIZE)
        for replica in range(replicas)
        for piece in batch[replica::replicas].chunk(NUM_MICROBATCHES)
    ]
    for piece in pieces:
        module.zero_grad()
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            module.training_step((piece,), 0).backward()
        finally:
            torch.set_default_dtype(previous)
        for name, parameter in module.named_parameters():
            total[name] += parameter.grad.double() / len(pieces)
    for name, parameter in module.named_parameters():
        update = 0.1 * total[name]
        error = found[name].double() - (parameter.detach().double() - update)
        # each microbatch's gradient is rounded, and the updated weight is
        rounding = torch.finfo(torch.bfloat16).eps * (2 * update.abs().max() + parameter.abs().max())
        assert error.abs().max() <= rounding, name


def fails(precision: Any) -> None:
    fitted(layout(2), precision, 1, 2)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("16-true", "precision='16-true' keeps weights in float16: their gradients underflow"),
        (MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), "'16-mixed' .* needs a CUDA device"),
    ],
    ids=["16-true", "16-mixed"],
)
def test_what_a_pipeline_cannot_run_is_refused(pool: WorkerPool, precision: Any, message: str) -> None:
    report = pool.run(fails, precision, world_size=2, expect_failure=True)
    assert all(re.search(message, report.failures[rank].message) for rank in range(2)), report
