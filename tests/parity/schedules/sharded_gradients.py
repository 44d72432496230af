"""Gradients of one optimizer step of a sharded pipeline, and those of the same module on one device.

Many steps run in one call of the pool: each is a Trainer of its own on a tiny module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from parity_run import QUIET
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineParallelStrategy

WIDTH, HIDDEN, WORDS, LENGTH, NUM_BLOCKS = 6, 10, 12, 3, 8


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        schedule: Name of the schedule.
        sharding: The strategy's mode.
        pipeline: Ranks along the pipeline.
        replicas: Data-parallel size.
        replicate: Data-parallel ranks with the same shards.
        budget: Units of the size of a block that may be gathered; None: the strategy chooses.
        checkpointing: Blocks run again in backward: "units" by the strategy's argument, "inside" by their own doing.
        accumulate: Batches per optimizer step.
        variant: What is special about the module: "", "tied", "frozen", "adapters", "bare" with units that have no
            parameters, or "regions", where pairs of blocks are run again together, which calls units out of the usual
            order of a backward.
        ragged: The replicas have batches of other sizes, hence other numbers of microbatches.
        offload: Shards lie on the host, which is the device here.
    """

    schedule: str
    sharding: str
    pipeline: int
    replicas: int
    replicate: int = 1
    budget: int | None = None
    checkpointing: str = ""
    accumulate: int = 1
    variant: str = ""
    ragged: bool = False
    offload: bool = False

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicas

    @property
    def num_microbatches(self) -> int:
        return 2 * self.pipeline if self.pipeline > 2 else 4

    def batch_size(self, replica: int) -> int:
        """Samples of a replica's batch."""
        return self.num_microbatches - 2 * (replica % 2) if self.ragged else self.num_microbatches

    def strategy(self) -> PipelineParallelStrategy:
        block_bytes = 8 * sum(p.numel() for p in Block("", self.variant).parameters())
        # rows padded to a multiple of four shards
        padded = None if self.budget is None else self.budget * int(1.4 * block_bytes)
        return PipelineParallelStrategy(
            pipeline_parallel_size=self.pipeline,
            data_parallel_size=self.replicas,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            sharding=self.sharding,  # type: ignore[arg-type]
            unshard_budget=padded,
            data_parallel_replicate_size=self.replicate,
            cpu_offload=self.offload,
            activation_checkpointing=["blocks.*"] if self.checkpointing == "units" else False,
            check_first_batches=False,  # which takes as long as the batch
        )

    def __str__(self) -> str:
        return "-".join(str(getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) not in (None, ""))


class Block(nn.Module):
    """A residual MLP with a parameter that nothing uses, and on request an adapter beside frozen weights."""

    def __init__(self, checkpointing: str, variant: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.without_gradient = nn.Parameter(torch.ones(3))
        self.runs_body_again = checkpointing == "inside"
        self.has_adapter = variant == "adapters"
        if self.has_adapter:
            self.requires_grad_(False)
            self.reduce = nn.Linear(WIDTH, 2, bias=False)
            self.expand = nn.Linear(2, WIDTH, bias=False)

    def body(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return y + self.expand(self.reduce(x)) if self.has_adapter else y

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.runs_body_again else self.body(x))


class Module(L.LightningModule):
    """An embedding, blocks and a head, and a layer that is never called."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(case.checkpointing, case.variant) for _ in range(NUM_BLOCKS))
        if case.variant == "bare":
            self.blocks[2], self.blocks[5] = nn.Tanh(), nn.Softsign()
        self.head = nn.Linear(WIDTH, WORDS)
        self.never_called = nn.Linear(2, 3)
        if case.variant == "tied":
            self.head.weight = self.embedding.weight
        if case.variant == "frozen":
            for part in (self.embedding, *self.blocks[:3], self.blocks[5]):
                part.requires_grad_(False)
            self.blocks[4].up.requires_grad_(False)
        self.gradients: dict[str, Tensor | None] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.embedding(batch[:, :-1])
        if self.case.variant == "regions":
            for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                h = checkpoint(lambda x, first=first, second=second: second(first(x)), h, use_reentrant=False)
        else:
            for block in self.blocks:
                h = block(h)
        return F.cross_entropy(self.head(h).transpose(1, 2), batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = gradients_of(self)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The gradients by all names, whole."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if found[name] is not None:
            found[name] = found[name].clone()  # type: ignore[union-attr]
    return found


def make_module(case: Case) -> Module:
    torch.manual_seed(3)
    return Module(case).double()


def batch_of(case: Case, index: int, replica: int) -> Tensor:
    """(B, T + 1) tokens."""
    generator = torch.Generator().manual_seed(100 * index + replica)
    return torch.randint(0, WORDS, (case.batch_size(replica), LENGTH + 1), generator=generator)


class Batches(Dataset[Tensor]):
    """The batches of one replica."""

    def __init__(self, case: Case, replica: int) -> None:
        self.batches = [batch_of(case, index, replica) for index in range(case.accumulate)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


def expected_gradients(case: Case) -> dict[str, Tensor | None]:
    """On one device, over the batches of all replicas at once."""
    module = make_module(case)
    for index in range(case.accumulate):
        batch = torch.cat([batch_of(case, index, replica) for replica in range(case.replicas)])
        (module.training_step(batch, index) / case.accumulate).backward()
    return gradients_of(module)


def trained(case: Case, callbacks: Iterable[L.Callback] = ()) -> tuple[Module, PipelineParallelStrategy]:
    """One optimizer step by the pipeline; in a worker."""
    strategy = case.strategy()
    trainer = L.Trainer(
        **QUIET,
        devices=case.world_size,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    module = make_module(case)
    replica = trainer.global_rank % case.replicas
    trainer.fit(module, DataLoader(Batches(case, replica), batch_size=None))
    return module, strategy


def largest_error(case: Case) -> float:
    """Of this rank's gradients, against one device; infinite if one is missing or too many. In a worker."""
    expected = expected_gradients(case)
    module, _ = trained(case)
    worst = 0.0
    for name, gradient in module.gradients.items():
        wanted = expected[name]
        if (gradient is None) != (wanted is None):
            return float("inf")
        if gradient is not None and wanted is not None:
            worst = max(worst, float((gradient - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)))
    return worst if any(gradient is not None for gradient in module.gradients.values()) or case.variant else 1.0


def largest_errors(cases: list[Case]) -> dict[str, Any]:
    """One after the other, in a worker."""
    return {str(case): largest_error(case) for case in cases}
