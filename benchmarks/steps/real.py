"""Steps of real processes: our schedules beside torch's and data parallelism, compiled and not.

By default two processes on two cores train a GPT of 8 blocks on batches of 16 sequences in 8 microbatches. Ours go
through ``Trainer`` with ``PipelineParallelStrategy``, Lightning's DDP through ``Trainer`` too, and the schedules of
``torch.distributed.pipelining`` through a plain loop around the same blocks. Every way has the same optimizer.
``limit`` is the same work of each rank in plain autograd, without messages and without a bubble: no pipeline can be
faster.

Each turn of a way is fresh processes with one thread each, forked from one that has imported everything; the
ways take turns. A line has the median over the turns of the time of a step (wall), over many steps in a row, and of
what the main thread of the busier rank computed in it (CPU).

    python benchmarks/steps/real.py                             # width 256, not compiled
    python benchmarks/steps/real.py --dim 256 512 --compile both
    python benchmarks/steps/real.py --ways ours:zb_h1 torch:1f1b limit --compile yes
    python benchmarks/steps/real.py --turns 1 --keep real.json  # a turn at a time; the table is of all turns kept there

With ``--device cuda`` the ranks share one GPU in bfloat16, and messages go by NCCL over sockets of the host. CUDA's
MPS, which must not run yet, gives each rank an equal share of the multiprocessors, so ranks compute side by side. They
still share the memory's bandwidth and the power of the device: in ``limit`` all compute at once, so there they have
less of both than where a rank waits. MPS refuses four ranks with 32 hardware queues each; they have 16.

    python benchmarks/steps/real.py --device cuda --ranks 4 --dim 4096 --blocks 16 --length 2048 --microbatches 12
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.doctor.sharing import variables_of_rank
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.schedule import available_schedules

NUM_WARM = 4
NUM_WARM_AUTO = 14  # it measures ten, and searches then
TORCHS: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}
FORK = multiprocessing.get_context("fork")
WAYS = [
    "limit",
    *(f"ours:{name}" for name in available_schedules()),
    *(f"torch:{name}" for name in TORCHS),
    "torch:ddp",
    "lightning:ddp",
]
COMPILE = {"dynamic": False}
PLACES: dict[str, Callable[[int], dict[str, Any]]] = {
    "cpu": lambda num_ranks: {"accelerator": "cpu", "devices": num_ranks},
    # NCCL takes one rank of a host on each device: each rank is a host
    "cuda": lambda num_ranks: {"accelerator": "gpu", "devices": 1, "num_nodes": num_ranks, "precision": "bf16-true"},
}
Turn = tuple[float, float, float]
"""Seconds of wall and CPU time of a step, and GiB that tensors took on the device at most."""
Turns = dict[str, list[Turn]]
"""The turns of each ``width compiled way``."""


class Sequences(Dataset[dict[str, Tensor]]):
    """Random bytes, the same on every rank.

    Args:
        length: Of a sequence, in bytes.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 256, (self.length + 1,), generator=generator)}


def batch_of(index: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch, [sequences, length] each, int64, on the device."""
    samples, number = Sequences(args.length), args.rows * args.microbatches
    bytes_ = torch.stack([samples[index * number + row]["input_ids"] for row in range(number)]).to(args.device)
    return bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of [B, T, 256] against [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(ByteGPT):
    """ByteGPT with the optimizer that every way has."""

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def model_of(args: argparse.Namespace) -> Model:
    """The whole model on the device, in bfloat16 on a GPU."""
    with torch.device(args.device):
        model = Model(num_layers=args.blocks, dim=args.dim, num_heads=args.dim // 64, max_seq_len=args.length)
    return model.bfloat16() if args.device == "cuda" else model


class Part(nn.Module):
    """A stage for torch: a share of the blocks, with the embeddings or the head at the ends."""

    def __init__(self, model: ByteGPT, stage: int, num_stages: int) -> None:
        super().__init__()
        share = len(model.blocks) // num_stages
        self.embedding = model.embedding if stage == 0 else None
        self.position = model.position if stage == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[stage * share : (stage + 1) * share])
        self.norm = model.norm if stage == num_stages - 1 else None
        self.head = model.head if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T] int64 or [B, T, D] to [B, T, D] or [B, T, 256]."""
        if self.embedding is not None and self.position is not None:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Clock(pl.Callback):
    """Wall and CPU time of the main thread at the end of each batch, when the device has ended it too.

    Args:
        num_warm: How many steps are not counted.
        num_steps: How many are.
        trace: File for torch's profile of one more step, for https://ui.perfetto.dev.
    """

    def __init__(self, num_warm: int, num_steps: int, trace: Path | None = None) -> None:
        self.num_warm = num_warm
        self.num_counted = num_warm + num_steps
        self.num_all = self.num_counted + (trace is not None)
        self.trace, self.profile = trace, torch.profiler.profile()
        self.times: list[tuple[float, float]] = []

    def tick(self) -> None:
        """A step has ended."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.times.append((time.perf_counter(), time.thread_time()))
        if self.trace is None:
            return
        if len(self.times) == self.num_counted:
            self.profile.start()
        elif len(self.times) > self.num_counted:
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.trace))

    def on_train_batch_end(self, *_: Any) -> None:
        """Of Trainer."""
        self.tick()

    def per_step(self) -> Turn:
        """Of the steps after the first ones."""
        (wall, cpu), (last_wall, last_cpu) = (self.times[number - 1] for number in (self.num_warm, self.num_counted))
        number = self.num_counted - self.num_warm
        num_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        return (last_wall - wall) / number, (last_cpu - cpu) / number, num_bytes / 2**30


def compile_blocks(model: nn.Module) -> None:
    """Compiles each block by itself, as ours does."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(**COMPILE)


def by_trainer(strategy: Any, args: argparse.Namespace, batch_size: int, clock: Clock, compile_all: bool) -> None:
    """A fit of so many steps."""
    model = model_of(args)
    if compile_all:
        compile_blocks(model)
    trainer = pl.Trainer(
        **PLACES[args.device](args.ranks),
        strategy=strategy,
        max_steps=clock.num_all,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Sequences(args.length), batch_size=batch_size))


def loop(step: Callable[[int], None], parameters: Any, clock: Clock) -> None:
    """The plain loop around ``step``."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for index in range(clock.num_all):
        optimizer.zero_grad()
        step(index)
        optimizer.step()
        clock.tick()


def torchs(name: str, rank: int, args: argparse.Namespace, clock: Clock) -> None:
    """A schedule of torch.distributed.pipelining."""
    kind = TORCHS[name]
    is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    num_stages = args.ranks if is_single else 2 * args.ranks
    second = num_stages - 1 - rank if name == "zb_v" else rank + args.ranks
    own = [rank] if is_single else [rank, second]
    model = model_of(args)
    if args.compile == "yes":
        # its split backward walks the graph twice, for which compiled code must not give its buffers away
        torch._functorch.config.donated_buffer = False
        compile_blocks(model)
    parts = [Part(model, stage, num_stages) for stage in own]
    stages = [
        pipelining.PipelineStage(part, stage, num_stages, torch.device(args.device))
        for part, stage in zip(parts, own, strict=True)
    ]
    schedule: Any = kind(stages[0] if is_single else stages, args.microbatches, loss_fn=loss_of)

    def step(index: int) -> None:
        inputs, targets = batch_of(index, args)
        last = {"target": targets, "losses": []} if num_stages - 1 in own else {}
        schedule.step(*([inputs] if 0 in own else []), return_outputs=False, **last)

    loop(step, nn.ModuleList(parts).parameters(), clock)


def torchs_ddp(rank: int, args: argparse.Namespace, clock: Clock) -> None:
    """A replica of the whole model on each rank, which has its part of the batch."""
    model = model_of(args)
    if args.compile == "yes":
        compile_blocks(model)
    replica = nn.parallel.DistributedDataParallel(model)

    def step(index: int) -> None:
        inputs, targets = (both.chunk(args.ranks)[rank] for both in batch_of(index, args))
        loss_of(replica(inputs), targets).backward()  # type: ignore[no-untyped-call]

    loop(step, model.parameters(), clock)


def limit(rank: int, args: argparse.Namespace, clock: Clock) -> None:
    """A rank's own forwards and backwards of every microbatch, with nobody else."""
    model = model_of(args)
    if args.compile == "yes":
        compile_blocks(model)
    part = Part(model, rank, args.ranks)
    like: dict[str, Any] = {"device": args.device, "dtype": model.head.weight.dtype}
    received = torch.randn(args.rows, args.length, args.dim, requires_grad=True, **like)
    gradient = torch.randn(args.rows, args.length, args.dim, **like)

    def step(index: int) -> None:
        parts = (both.split(args.rows) for both in batch_of(index, args))  # type: ignore[no-untyped-call]
        for inputs, targets in zip(*parts, strict=True):
            values = part(inputs if rank == 0 else received)
            if rank == args.ranks - 1:
                loss_of(values, targets).backward()  # type: ignore[no-untyped-call]
            else:
                values.backward(gradient)

    loop(step, part.parameters(), clock)


def run_one(way: str, rank: int, args: argparse.Namespace, port: int, answer: Connection) -> None:
    """A rank of one way; sends its times."""
    ranks = str(args.ranks)
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "real"}
    if args.device == "cuda":
        os.environ |= {**variables_of_rank(rank, args.ranks), "CUDA_DEVICE_MAX_CONNECTIONS": "16"}
        os.environ |= {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    kind, _, name = way.partition(":")
    trace = args.trace and args.trace / f"{way.replace(':', '_')}_rank{rank}.json"
    clock = Clock(NUM_WARM_AUTO if name == "auto" else NUM_WARM, args.steps, trace)
    is_compiled = args.compile == "yes"
    if kind == "ours":
        strategy = PipelineParallelStrategy(
            args.ranks, num_microbatches=args.microbatches, schedule=name, compile=COMPILE if is_compiled else False
        )
        by_trainer(strategy, args, args.rows * args.microbatches, clock, compile_all=False)
    elif kind == "lightning":
        by_trainer("ddp", args, args.rows * args.microbatches // args.ranks, clock, compile_all=is_compiled)
    else:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        if kind == "limit":
            limit(rank, args, clock)
        elif name == "ddp":
            torchs_ddp(rank, args, clock)
        else:
            torchs(name, rank, args, clock)
        dist.barrier()
        dist.destroy_process_group()
    answer.send(clock.per_step())


def turn(way: str, args: argparse.Namespace) -> Turn:
    """Runs one way in fresh processes: the most of each figure over the ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    answers: list[Any] = []
    processes = []
    for rank in range(args.ranks):
        mine, its = FORK.Pipe()
        processes.append(FORK.Process(target=run_one, args=(way, rank, args, port, its)))
        processes[-1].start()
        its.close()  # so that a process that ends without an answer is noticed
        answers.append(mine)
    times: list[Turn] = []
    try:
        while answers:
            ready: list[Any] = wait(answers)
            for answer in ready:
                times.append(answer.recv())
                answers.remove(answer)
    except EOFError:
        for process in processes:
            process.kill()
        raise SystemExit(f"{way} ended without times") from None
    finally:
        for process in processes:
            process.join()
    wall, cpu, gib = map(max, zip(*times, strict=True))
    return wall, cpu, gib


def control(command: str) -> None:
    """Tells MPS."""
    subprocess.run(["nvidia-cuda-mps-control"], input=f"{command}\n", text=True, check=False)


@contextmanager
def multiprocessors_in_equal_shares(num_ranks: int) -> Iterator[None]:
    """CUDA's MPS for the processes that start within, each with its share of the multiprocessors."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // num_ranks)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        control("start_server -uid 0")  # several ranks that start it together are refused
        try:
            yield
        finally:
            control("quit")


def main() -> None:
    """Runs the ways in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[256], help="width, a multiple of 64")
    parser.add_argument("--compile", choices=["no", "yes", "both"], default="no", help="whether blocks are compiled")
    parser.add_argument("--ways", nargs="*", default=WAYS, help=f"of {' '.join(WAYS)}")
    parser.add_argument("--device", choices=list(PLACES), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8, help="a multiple of twice the ranks")
    parser.add_argument("--length", type=int, default=128, help="of a sequence")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured, after the first ones")
    parser.add_argument("--keep", type=Path, metavar="PATH", help="add the turns to those in this JSON file")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a profile of a step of each rank there")
    given = parser.parse_args()
    if given.trace:
        given.trace.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    compiled = ["no", "yes"] if given.compile == "both" else [given.compile]
    found: Turns = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    with multiprocessors_in_equal_shares(given.ranks) if given.device == "cuda" else nullcontext():
        for _ in range(given.turns):
            for dim, is_compiled, way in itertools.product(given.dim, compiled, given.ways):
                args = argparse.Namespace(**{**vars(given), "dim": dim, "compile": is_compiled})
                found.setdefault(f"{dim} {is_compiled} {way}", []).append(turn(way, args))
                if given.keep:
                    given.keep.write_text(json.dumps(found))
    print_table(found)


def print_table(found: Turns) -> None:
    """A row for each way, of the medians of its turns."""
    medians = {key: [statistics.median(column) for column in zip(*times, strict=True)] for key, times in found.items()}
    print("| width | compiled | way | turns | wall ms | CPU ms | GiB on the GPU | wall over limit | CPU over limit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for key, (*times, gib) in medians.items():
        dim, compiled, way = key.split()
        best = medians.get(f"{dim} {compiled} limit")
        ratios = [f"{time / least:.3f}" for time, least in zip(times, best, strict=False)] if best else ["", ""]
        cells = (
            dim,
            compiled,
            way,
            str(len(found[key])),
            *(f"{1e3 * time:.1f}" for time in times),
            f"{gib:.1f}",
            *ratios,
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
