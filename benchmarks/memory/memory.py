"""Memory of a training step: measured, estimated from the dry run, and measured under torch.distributed.pipelining.

    python benchmarks/memory/memory.py --check

A GPT is trained in several processes over gloo, by every schedule in turn: ours by the strategy; and by the class of
torch.distributed.pipelining where it has one, over the same blocks cut at the same places. Parameters, gradients and
optimizer state are counted by walking tensors. Activations are counted by watching every allocation (a dispatch mode
with weak references to storages): what lives after an action of the program beyond gradients and what lived before,
messages included; the most over the second step. Receive buffers that torch makes in the first step and keeps count.

``--check`` exits with 1 unless every estimate is within 10 % of what is measured, activations under ``v_half`` and
``v_min`` stay within the peak that the schedule promises, and ours take no more than torch's. Beside the messages that
the estimate counts, from when they are sent, ranks have two receive buffers for each neighbour, posted ahead of that.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.extend(sorted({str(path.parent) for path in (Path(__file__).parents[2] / "tests").rglob("*.py")}))

import lightning.pytorch as L
import torch
import torch.distributed as dist
from live_memory import LiveMemory
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.runtime.transport.route import _RECEIVES_AHEAD
from lightning_pp.split.memory.estimate import estimate_memory
from lightning_pp.split.memory.state_memory import StateSizes, optimizer_bytes_per_parameter

VOCABULARY, WIDTH, HEADS, LENGTH, SAMPLES = 256, 128, 4, 128, 2
PARTS = ("parameters", "gradients", "optimizer state", "activations")
PEERS = {"gpipe": "GPipe", "1f1b": "1F1B", "zb_v": "ZBVZeroBubble"}
IN_V = ("zb_v", "v_half", "v_min")
TOLERANCE = 0.1
MESSAGE_BYTES = 4 * SAMPLES * LENGTH * WIDTH


class Setting(NamedTuple):
    """What is trained by every schedule."""

    num_ranks: int
    num_microbatches: int

    @property
    def num_blocks(self) -> int:
        """Four on every rank."""
        return 4 * self.num_ranks

    def promised_microbatches(self, schedule: str) -> int | None:
        """The most microbatches whose activations a rank has at a time, where the schedule's point is to bound it."""
        p = self.num_ranks
        return {"v_half": (p + 2) // 2, "v_min": (p + 4) // 3}.get(schedule)


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens)
        return embedded + self.positions


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        added: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + added


class Head(nn.Sequential):
    """A norm and logits."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(L.LightningModule):
    """Its layers in one list, as torch's stages need them."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Embedding(), *(Block() for _ in range(num_blocks)), Head()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, targets = batch
        for layer in self.layers:
            x = layer(x)
        return loss_of(x, targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def first_layers(num_stages: int, num_blocks: int) -> list[int]:
    """Where stages begin: as many blocks in each."""
    return [0, *(1 + stage * num_blocks // num_stages for stage in range(1, num_stages))]


def tokens(num_samples: int) -> tuple[Tensor, Tensor]:
    """Made-up inputs and targets."""
    inputs, targets = torch.randint(0, VOCABULARY, (2, num_samples, LENGTH)).unbind()
    return inputs, targets


class Peak:
    """The most that lives after an action, beyond what was there at the start and beyond gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.memory, self.module, self.peak = LiveMemory(threshold=64), module, 0
        self.is_second_step = False

    def sample(self) -> None:
        """After an action."""
        if self.is_second_step:
            gradients = sum(p.grad.nbytes for p in self.module.parameters() if p.grad is not None)
            self.peak = max(self.peak, self.memory.live_bytes - gradients)


def state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Parameters, gradients and optimizer state, by walking tensors."""
    states = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer state": sum(v.nbytes for v in states),
    }


def ours(rank: int, schedule: str, setting: Setting) -> dict[str, Any]:
    """Three steps by the strategy, the second of them watched; and the estimate."""
    p, m = setting.num_ranks, setting.num_microbatches
    module = GPT(setting.num_blocks)
    peak = Peak(module)
    found: dict[str, Any] = {}
    stop = StepTimer.stop

    def stop_and_sample(self: StepTimer, *args: Any, **kwargs: Any) -> Any:
        peak.sample()
        return stop(self, *args, **kwargs)

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                module.zero_grad()  # so that gradients are made while watched, and subtracted
                peak.memory.__enter__()  # type: ignore[no-untyped-call]
                peak.is_second_step = True

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                peak.is_second_step = False
                peak.memory.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                found.update(state_bytes(module, trainer.optimizers[0]))

    num_stages = 2 * p if schedule in IN_V else p
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=p,
        data_parallel_size=1,
        num_microbatches=m,
        schedule=schedule,
        units="layers.*",
        split_points=[f"layers.{first}" for first in first_layers(num_stages, setting.num_blocks)[1:]],
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=p,
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    StepTimer.stop = stop_and_sample  # type: ignore[method-assign]
    try:
        trainer.fit(module, DataLoader(TensorDataset(*tokens(3 * m * SAMPLES)), batch_size=m * SAMPLES))
    finally:
        StepTimer.stop = stop  # type: ignore[method-assign]
    split, last_step = strategy.engine.split, strategy.engine.last_training_step
    assert last_step is not None
    estimate = estimate_memory(
        split.record,
        split.partition,
        split.placement,
        split.parameter_sizes,
        StateSizes(optimizer_bytes=optimizer_bytes_per_parameter(torch.optim.AdamW([torch.zeros(1)]))),
        schedule=last_step[0],
    )
    own = estimate.ranks[rank]
    found["activations"] = peak.peak
    found["estimate"] = {
        "parameters": own.state.parameters_bytes,
        "gradients": own.state.gradients_bytes,
        "optimizer state": own.state.optimizer_state_bytes,
        "activations": (own.activations_bytes or 0) + own.edge_buffers_bytes,
    }
    found["messages"] = own.edge_buffers_bytes
    found["microbatch"] = sum(s.held_after_forward_bytes for s in estimate.stages if s.rank == rank)
    return found


def torchs(rank: int, schedule: str, setting: Setting) -> dict[str, Any]:
    """Two steps by torch's schedule, the second of them watched."""
    p, m, num_blocks = setting.num_ranks, setting.num_microbatches, setting.num_blocks
    num_stages = 2 * p if schedule in IN_V else p
    own = [rank, num_stages - 1 - rank] if schedule in IN_V else [rank]
    layers = GPT(num_blocks).layers
    starts = [*first_layers(num_stages, num_blocks), len(layers)]
    parts = [nn.Sequential(*layers[starts[stage] : starts[stage + 1]]) for stage in own]
    module = nn.ModuleList(parts)
    del layers
    peak = Peak(module)
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, n, num_stages, device) for part, n in zip(parts, own, strict=True)]
    for stage in stages:
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            original = getattr(stage, method)

            def sampled(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                peak.sample()
                return result

            setattr(stage, method, sampled)
    run = get_schedule_class(PEERS[schedule])(stages if schedule in IN_V else stages[0], m, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(2):
        inputs, targets = tokens(m * SAMPLES)
        optimizer.zero_grad()
        peak.is_second_step = step == 1
        with peak.memory:
            run.step(
                *([inputs] if 0 in own else []),
                **({"target": targets, "losses": []} if num_stages - 1 in own else {}),
            )
        optimizer.step()
    return {**state_bytes(module, optimizer), "activations": peak.peak}


def worker(rank: int, schedules: list[str], setting: Setting, folder: str) -> None:
    """One process; every schedule and runtime has a process group of its own."""
    size = str(setting.num_ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="memory")
    torch.set_num_threads(1)
    for schedule in schedules:
        for run in (ours, torchs) if schedule in PEERS else (ours,):
            name = f"{folder}/{run.__name__}_{schedule}"
            dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=setting.num_ranks)
            torch.save(run(rank, schedule, setting), f"{name}_{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


def report(schedule: str, setting: Setting, folder: str) -> list[str]:
    """Prints a line for every rank; returns what is not as it should be."""
    failures = []
    for rank in range(setting.num_ranks):
        row = torch.load(f"{folder}/ours_{schedule}_{rank}.pt")
        peer = torch.load(f"{folder}/torchs_{schedule}_{rank}.pt") if schedule in PEERS else None
        cells = []
        for part in PARTS:
            ratio = row["estimate"][part] / row[part]
            if abs(ratio - 1) > TOLERANCE:
                failures.append(f"{schedule} rank {rank}: estimated / measured {part} is {ratio:.3f}")
            versus = ""
            if peer is not None:
                versus = f", torch {peer[part] / 2**10:.0f}"
                if row[part] > peer[part] * 1.001:
                    failures.append(f"{schedule} rank {rank}: {part} {row[part]}, torch's {peer[part]}")
            cells.append(f"{part} {row[part] / 2**10:.0f} ({ratio:.3f}{versus})")
        held = (row["activations"] - row["messages"]) / row["microbatch"]
        promised = setting.promised_microbatches(schedule)
        neighbours = 1 if rank in (0, setting.num_ranks - 1) else 2
        posted = _RECEIVES_AHEAD * neighbours * MESSAGE_BYTES / row["microbatch"]
        if promised is not None and held - posted > promised:
            failures.append(f"{schedule} rank {rank}: activations of {held:.2f} microbatches, promised {promised}")
        of = "" if promised is None else f" of {promised}"
        print(f"{schedule:7s} rank {rank}  {'  '.join(cells)}  microbatches {held:.2f}{of}", flush=True)
    return failures


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_v", "v_half", "v_min"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    options = parser.parse_args()
    setting = Setting(options.ranks, options.microbatches)
    print(
        f"{setting.num_ranks} ranks, {setting.num_microbatches} microbatches, {setting.num_blocks} blocks; KiB", end=""
    )
    print(" (estimated / measured); microbatches: activations in those of one microbatch, without messages")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        # forked, so that one process imports what takes long
        start_processes(  # type: ignore[no-untyped-call]
            worker, (options.schedules, setting, folder), nprocs=setting.num_ranks, start_method="fork"
        )
        for schedule in options.schedules:
            failures += report(schedule, setting, folder)
    for failure in failures:
        print(f"MISSED: {failure}")
    if options.check and failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
