"""Memory of a training step: measured, estimated from the dry run, and measured under torch.distributed.pipelining.

    python benchmarks/memory.py --schedules 1f1b zb_v v_half v_min --ranks 4 --microbatches 12

Every schedule runs in processes of its own, over gloo. Activations are counted by watching every allocation
(a dispatch mode with weak references to storages): what lives after each action of the program, beyond what lived
before the step and beyond gradients; the most over the step. Parameters, gradients and optimizer state are counted by
walking tensors. torch's schedules run the same blocks, cut at the same places, in the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from live_memory import LiveMemory
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.split.memory import estimate_memory, optimizer_bytes_per_parameter

WIDTH, LENGTH, SAMPLES = 64, 32, 2
PEERS = {"1f1b": "Schedule1F1B", "zb_v": "ScheduleZBVZeroBubble", "gpipe": "ScheduleGPipe"}


class Block(nn.Module):
    """A norm and an MLP, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(L.LightningModule):
    """Blocks, and nothing at the ends that would make stages uneven."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peak:
    """The most that lives after an action, beyond what was there at the start and beyond gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.memory, self.module, self.peak, self.is_on = LiveMemory(threshold=64), module, 0, False

    def sample(self) -> None:
        if self.is_on:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            known = sum(g.nbytes for g in gradients)
            self.peak = max(self.peak, self.memory.live_bytes - known)


def sizes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes by walking tensors."""
    states = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer state": sum(v.nbytes for v in states),
    }


def ours(rank: int, name: str, num_ranks: int, m: int, num_blocks: int) -> dict[str, Any]:
    """Three steps by the strategy; the second is watched."""
    module = Model(num_blocks)
    peak = Peak(module)
    stop = StepTimer.stop

    def stop_and_sample(self: StepTimer, *args: Any, **kwargs: Any) -> Any:
        peak.sample()
        return stop(self, *args, **kwargs)

    StepTimer.stop = stop_and_sample  # type: ignore[method-assign]
    found: dict[str, Any] = {}

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:  # gradients set to None and made anew are watched and subtracted
                module.zero_grad()
                peak.memory.__enter__()
                peak.is_on = True

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                peak.is_on = False
                peak.memory.__exit__(None, None, None)
                found.update(sizes(module, trainer.optimizers[0]))

    strategy = PipelineParallelStrategy(num_ranks, 1, m, schedule=name)
    data = TensorDataset(*(torch.randn(3 * m * SAMPLES, LENGTH, WIDTH) for _ in range(2)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    trainer.fit(module, DataLoader(data, batch_size=m * SAMPLES))
    split, schedule = strategy.engine.split, strategy.engine.last_training_step[0]  # type: ignore[index]
    estimate = estimate_memory(
        split.record,
        split.partition,
        split.placement,
        split.parameter_sizes(),
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter(torch.optim.AdamW),
        schedule=schedule,
    )
    own = estimate.ranks[rank]
    found["activations"] = peak.peak
    found["estimate"] = {
        "parameters": own.state.parameters_bytes,
        "gradients": own.state.gradients_bytes,
        "optimizer state": own.state.optimizer_state_bytes,
        "activations": own.activations_bytes,
    }
    # of a microbatch on the whole rank, as the papers count
    found["per microbatch"] = sum(s.held_after_forward_bytes for s in estimate.stages if s.rank == rank)
    return found


def torchs(rank: int, name: str, num_ranks: int, m: int, num_blocks: int) -> dict[str, Any]:
    """Two steps by torch's schedule; the second is watched."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    is_v = name == "zb_v"
    num_stages = 2 * num_ranks if is_v else num_ranks
    numbers = [rank, num_stages - 1 - rank] if is_v else [rank]
    whole = Model(num_blocks).blocks
    per_stage = num_blocks // num_stages
    modules = [nn.Sequential(*whole[n * per_stage : (n + 1) * per_stage]) for n in numbers]
    module = nn.ModuleList(modules)
    peak = Peak(module)
    device = torch.device("cpu")
    stages = [PipelineStage(part, n, num_stages, device) for part, n in zip(modules, numbers, strict=True)]
    for stage in stages:
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            original = getattr(stage, method)

            def sampled(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                peak.sample()
                return result

            setattr(stage, method, sampled)
    kind = getattr(pipelining.schedules, PEERS[name])
    schedule = kind(stages if is_v else stages[0], m, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(2):
        x, y = torch.randn(m * SAMPLES, LENGTH, WIDTH), torch.randn(m * SAMPLES, LENGTH, WIDTH)
        optimizer.zero_grad()
        has_first, has_last = 0 in numbers, num_stages - 1 in numbers
        peak.is_on = step == 1
        if peak.is_on:
            peak.memory.__enter__()
        schedule.step(*([x] if has_first else []), **({"target": y, "losses": []} if has_last else {}))
        if peak.is_on:
            peak.memory.__exit__(None, None, None)
        optimizer.step()
    return {**sizes(module, optimizer), "activations": peak.peak}


def worker(rank: int, kind: str, name: str, num_ranks: int, m: int, num_blocks: int, folder: str) -> None:
    """One process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="memory")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{kind}_{name}", rank=rank, world_size=num_ranks)
    found = (ours if kind == "ours" else torchs)(rank, name, num_ranks, m, num_blocks)
    torch.save(found, f"{folder}/{kind}_{name}_{rank}.pt")


def main() -> None:
    """Prints a line per schedule, runtime and rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "zb_v", "v_half", "v_min"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    options = parser.parse_args()
    p, m = options.ranks, options.microbatches
    print(f"{p} ranks, {m} microbatches; KiB; estimate / measured in brackets; held = activations / a microbatch's")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.schedules:
            for kind in ("ours", "torch") if name in PEERS else ("ours",):
                mp.spawn(worker, (kind, name, p, m, 4 * p, folder), nprocs=p)
                for rank in range(p):
                    row = torch.load(f"{folder}/{kind}_{name}_{rank}.pt")
                    estimate = row.get("estimate", {})
                    cells = []
                    for what in ("parameters", "gradients", "optimizer state", "activations"):
                        ratio = f" ({estimate[what] / max(row[what], 1):.3f})" if estimate else ""
                        cells.append(f"{what} {row[what] / 1024:.0f}{ratio}")
                    held = f"  held {row['activations'] / row['per microbatch']:.2f}" if estimate else ""
                    print(f"{name:8s} {kind:6s} rank {rank}  {'  '.join(cells)}{held}", flush=True)


if __name__ == "__main__":
    main()
