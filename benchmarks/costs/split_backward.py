"""Split backward, ours beside torch's, in one run: time of I and W, bytes held between them, and checkpointed re-runs.

Run it with ``python benchmarks/costs/split_backward.py`` (``--help`` for the rest) on an idle machine. For transformer
blocks that are all overhead (tiny) and all arithmetic (compute-bound), each repeat runs a full backward by plain
autograd, a split one by :mod:`lightning_pp.runtime.split_backward.deferral`, and one by
``torch.distributed.pipelining``, each after a forward of its own. Gradients exist already, as from the second
microbatch on. Reported are medians over the repeats, and medians of the ratios within each.

Held are the storages that operations of F and I made and that live after I, without gradients of parameters, the
stage's output, and its input's gradient, which a pipeline holds or sends either way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)
from lightning_pp.runtime.split_backward.replacements import TABLE

MAX_RATIO_COMPUTE_BOUND = 1.05
MAX_RATIO_TINY = 1.5
MAX_HELD_RATIO = 0.65
NUM_WARM_UP = 3


class GPTBlock(nn.Module):
    """Layer norm, fused query, key and value, GELU, biases."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        update: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + update


class LlamaBlock(nn.Module):
    """RMS norm, separate query, key and value, SwiGLU, no biases."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.projection = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden_width = 8 * width // 3 // 16 * 16
        self.gate, self.up = (nn.Linear(width, hidden_width, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            project(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        update: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + update


@dataclass(frozen=True)
class Workload:
    """A stage and the size of its microbatches."""

    name: str
    block: type[nn.Module]
    num_blocks: int
    width: int
    num_heads: int
    batch_size: int
    sequence_length: int
    num_repeats: int
    max_ratio: float

    def make(self, device: str, dtype: torch.dtype) -> tuple[nn.Sequential, Tensor, Tensor]:
        """The stage, an input that requires a gradient, and the gradient of the output."""
        torch.manual_seed(0)
        stage = nn.Sequential(*[self.block(self.width, self.num_heads) for _ in range(self.num_blocks)])
        x, grad_output = torch.randn(
            2, self.batch_size, self.sequence_length, self.width, device=device, dtype=dtype
        ).unbind()
        return stage.to(device, dtype), x.detach().requires_grad_(), grad_output


def workloads(device: str) -> list[Workload]:
    """Tiny and compute-bound stages; larger ones where the device is faster."""
    tiny = {"num_blocks": 8, "width": 32, "num_heads": 2, "batch_size": 2, "sequence_length": 8, "num_repeats": 300}
    large = {"num_blocks": 2, "width": 512, "num_heads": 8, "batch_size": 4, "sequence_length": 256, "num_repeats": 15}
    if device != "cpu":
        large = {
            "num_blocks": 4, "width": 4096, "num_heads": 32, "batch_size": 4, "sequence_length": 2048, "num_repeats": 20
        }  # fmt: skip
    return [
        Workload(f"{size} {block.__name__.removesuffix('Block')}", block, max_ratio=max_ratio, **sizes)
        for size, sizes, max_ratio in (
            ("tiny", tiny, MAX_RATIO_TINY),
            ("compute-bound", large, MAX_RATIO_COMPUTE_BOUND),
        )
        for block in (GPTBlock, LlamaBlock)
    ]


@dataclass
class Timing:
    """Medians in milliseconds, and medians of the ratios to plain autograd in the same repeat."""

    workload: str
    forward_ms: float
    deferrable_forward_ms: float
    backward_ms: float
    merged_ratio: float
    ours_input_ms: float
    ours_weight_ms: float
    ours_ratio: float
    torch_input_ms: float
    torch_weight_ms: float
    torch_ratio: float
    max_ratio: float


@dataclass
class Held:
    """Bytes that live between I and W because of one microbatch."""

    workload: str
    ours_bytes: int
    torch_bytes: int
    ratio: float
    max_ratio: float


@dataclass
class Reruns:
    """Forwards of four checkpointed blocks after F, in I and in W."""

    ours_input: int
    ours_weight: int
    torch_input: int
    torch_weight: int


def time_of(device: str, action: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Milliseconds that ``action(*args)`` takes on the device, and what it returns."""
    _synchronize(device)
    start = time.perf_counter()
    result = action(*args)
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3, result


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def measure_time(workload: Workload, device: str, dtype: torch.dtype, num_repeats: int) -> Timing:
    """Times every way of running backward, one after the other within each repeat."""
    stage, x, grad_output = workload.make(device, dtype)
    weights = list(stage.parameters())

    def collect(output: Tensor, queue: WeightGradientQueue) -> None:
        with collect_weight_gradients(queue):
            torch.autograd.backward(output, grad_output)

    rows: list[dict[str, float]] = []
    for _ in range(num_repeats + NUM_WARM_UP):
        row: dict[str, float] = {}
        row["forward"], output = time_of(device, stage, x)
        row["backward"], _ = time_of(device, torch.autograd.backward, output, grad_output)

        with weight_gradients_deferrable():
            output = stage(x)
            row["merged"], _ = time_of(device, torch.autograd.backward, output, grad_output)

            queue = WeightGradientQueue()
            row["deferrable forward"], output = time_of(device, stage, x)
            row["our input"], _ = time_of(device, collect, output, queue)
        row["our weight"], _ = time_of(device, queue.run)

        output = stage(x)
        row["torch input"], (_, groups) = time_of(
            device, stage_backward_input, [output], [grad_output], [x], iter(weights)
        )
        row["torch weight"], _ = time_of(device, stage_backward_weight, iter(weights), groups)
        x.grad = None
        rows.append(row)
    rows = rows[NUM_WARM_UP:]

    def median(*names: str, relative: bool = False) -> float:
        return statistics.median(
            sum(row[name] for name in names) / (row["backward"] if relative else 1) for row in rows
        )

    return Timing(
        workload=workload.name,
        forward_ms=median("forward"),
        deferrable_forward_ms=median("deferrable forward"),
        backward_ms=median("backward"),
        merged_ratio=median("merged", relative=True),
        ours_input_ms=median("our input"),
        ours_weight_ms=median("our weight"),
        ours_ratio=median("our input", "our weight", relative=True),
        torch_input_ms=median("torch input"),
        torch_weight_ms=median("torch weight"),
        torch_ratio=median("torch input", "torch weight", relative=True),
        max_ratio=workload.max_ratio,
    )


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weak references to every storage that an operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                reference = _reference(value)
                self.storages[reference.cdata] = (reference, value.untyped_storage().nbytes())
        return result

    def held_bytes(self, besides: Sequence[Tensor | None]) -> int:
        """Bytes of the recorded storages that are alive, without those of ``besides``."""
        excluded = {_reference(tensor).cdata for tensor in besides if tensor is not None}
        return sum(
            num_bytes
            for cdata, (reference, num_bytes) in self.storages.items()
            if cdata not in excluded and not bool(reference.expired())
        )


def _reference(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def measure_held(workload: Workload, device: str, dtype: torch.dtype) -> Held:
    """Compares what both ways keep alive between I and W."""

    def ours(stage: nn.Module, x: Tensor, grad_output: Tensor) -> tuple[Tensor, object]:
        queue = WeightGradientQueue()
        with weight_gradients_deferrable():
            output = stage(x)
            with collect_weight_gradients(queue):
                torch.autograd.backward(output, grad_output)
        return output, queue

    def torchs(stage: nn.Module, x: Tensor, grad_output: Tensor) -> tuple[Tensor, object]:
        output = stage(x)
        _, groups = stage_backward_input([output], [grad_output], [x], stage.parameters())
        return output, groups

    held = []
    for run in (ours, torchs):
        stage, x, grad_output = workload.make(device, dtype)
        with _Storages() as storages:
            output, kept = run(stage, x, grad_output)
            besides = [x, x.grad, output, grad_output]
            for parameter in stage.parameters():
                besides += [parameter, parameter.grad]
            held.append(storages.held_bytes(besides))
        del kept
    return Held(workload.name, held[0], held[1], held[0] / held[1], MAX_HELD_RATIO)


def measure_reruns() -> Reruns:
    """Counts the forwards of four checkpointed blocks in I and in W."""
    num_forwards = 0

    class Counted(GPTBlock):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal num_forwards
            num_forwards += 1
            return super().forward(x)

    stage = nn.Sequential(*[Counted(32, 2) for _ in range(4)])
    x, grad_output = torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 32)

    def forward() -> Tensor:
        output = x
        for block in stage:
            output = checkpoint(block, output, use_reentrant=False)
        return output

    @contextmanager
    def counted(counts: list[int]) -> Iterator[None]:
        before = num_forwards
        yield
        counts.append(num_forwards - before)

    counts: list[int] = []
    queue = WeightGradientQueue()
    with weight_gradients_deferrable():
        output = forward()
        with counted(counts), collect_weight_gradients(queue):
            torch.autograd.backward(output, grad_output)
    with counted(counts):
        queue.run()
    output = forward()
    with counted(counts):
        _, groups = stage_backward_input([output], [grad_output], [x], stage.parameters())
    with counted(counts):
        stage_backward_weight(stage.parameters(), groups)
    return Reruns(*counts)


class _ReplacingMode(TorchFunctionMode):
    """What the table of replaced functions does, by a function mode."""

    _functions: ClassVar[dict[Any, Any]] = {entry.original: entry.function for entry in TABLE}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._functions.get(function, function)(*args, **(kwargs or {}))


def share_left_for_w(make_scope: Callable[[], AbstractContextManager[Any]], is_checkpointed: bool) -> float | None:
    """The share of the weights of torch's encoder layer whose gradient waits for W; None if backward fails."""
    layer = nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 32, requires_grad=True)
    with make_scope():
        output = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
        try:
            with collect_weight_gradients(WeightGradientQueue()):
                torch.autograd.backward(output, torch.ones_like(output))
        except CheckpointError:
            return None
    weights = [parameter for parameter in layer.parameters() if parameter.dim() == 2]
    return sum(w.numel() for w in weights if w.grad is None) / sum(w.numel() for w in weights)


def show_modes(console: Console) -> None:
    """Prints what the table of replaced functions reaches beside a function mode."""
    table = Table(title="Weights of nn.TransformerEncoderLayer whose gradients wait for W")
    for column in ("", "replaced functions", "a function mode"):
        table.add_column(column)
    for name, is_checkpointed in (("as it is", False), ("checkpointed", True)):
        shares = [share_left_for_w(scope, is_checkpointed) for scope in (weight_gradients_deferrable, _ReplacingMode)]
        table.add_row(name, *["CheckpointError" if share is None else f"{share:.2f}" for share in shares])
    console.print(table)


def show(console: Console, timings: list[Timing], held: list[Held], reruns: Reruns) -> None:
    """Prints the three tables; "B in scope" is a full backward inside the scope that makes gradients deferrable."""
    table = Table(title="I + W over one full backward by plain autograd (medians, ms)")
    for column in (
        "",
        "F",
        "F in scope",
        "full",
        "I",
        "W",
        "(I+W)/full",
        "target",
        "torch I",
        "torch W",
        "torch's ratio",
    ):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    table.add_column("B in scope", justify="right")
    for t in timings:
        times = (t.forward_ms, t.deferrable_forward_ms, t.backward_ms, t.ours_input_ms, t.ours_weight_ms)
        table.add_row(
            t.workload,
            *[f"{value:.3f}" for value in times],
            f"{t.ours_ratio:.3f}",
            f"≤ {t.max_ratio}",
            f"{t.torch_input_ms:.3f}",
            f"{t.torch_weight_ms:.3f}",
            f"{t.torch_ratio:.3f}",
            f"{t.merged_ratio:.3f}",
        )
    console.print(table)
    table = Table(title="Held between I and W (MiB)")
    for column in ("", "ours", "torch's", "ours/torch's", "target"):
        table.add_column(column, justify="right" if column else "left")
    for h in held:
        sizes = (h.ours_bytes / 2**20, h.torch_bytes / 2**20)
        table.add_row(h.workload, *[f"{size:.3f}" for size in sizes], f"{h.ratio:.3f}", f"≤ {h.max_ratio}")
    console.print(table)
    table = Table(title="Forwards of 4 checkpointed blocks after F")
    for column in ("", "in I", "in W"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("ours", str(reruns.ours_input), str(reruns.ours_weight))
    table.add_row("torch's", str(reruns.torch_input), str(reruns.torch_weight))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 if ``--check`` is given and a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu or an accelerator such as cuda")
    parser.add_argument("--dtype", default="float32", help="of weights and activations, such as bfloat16")
    parser.add_argument("--num-threads", type=int, default=1, help="threads of torch's CPU kernels")
    parser.add_argument("--repeats", type=float, default=1.0, help="factor on the number of repeats")
    parser.add_argument("--only", default="", help="only workloads with this in their name")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.num_threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    chosen = [workload for workload in workloads(options.device) if options.only in workload.name]
    if not chosen:
        parser.error(f"--only {options.only!r} is in none of {[w.name for w in workloads(options.device)]}")

    held = [measure_held(workload, options.device, dtype) for workload in chosen]
    reruns = measure_reruns()
    timings = [
        measure_time(workload, options.device, dtype, max(3, round(workload.num_repeats * options.repeats)))
        for workload in chosen
    ]
    console = Console(width=160)
    show(console, timings, held, reruns)
    show_modes(console)
    if options.json:
        figures = {
            "torch": torch.__version__,
            "device": options.device,
            "dtype": options.dtype,
            "num_threads": options.num_threads,
            "timings": [asdict(timing) for timing in timings],
            "held": [asdict(one) for one in held],
            "reruns": asdict(reruns),
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    missed = [t.workload for t in timings if t.ours_ratio > t.max_ratio]
    missed += [h.workload for h in held if h.ratio > h.max_ratio]
    missed += [] if (reruns.ours_input, reruns.ours_weight) == (4, 0) else ["checkpointed blocks"]
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
