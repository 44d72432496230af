"""How near estimates of units' costs are to what units take: by FLOPs alone, and by FLOPs or bytes, the longer of both.

``python benchmarks/planning/unit_shares.py``, alone on the machine. Each distinct unit of some models runs alone on the
CPU with one thread, as ``lightning-pp-plan --measure`` runs it. What a matrix product and a copy reach here is measured
first. A row tells which part of the work an estimate has on the wrong units: half of the sum over units of the
difference between their share of the estimate and their share of the measured time, 0 for none, 100 % for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from lightning_pp.planning.stage_model import record_model
from lightning_pp.planning.unit_times.measure import UnitTimes
from lightning_pp.split.cut.unit_costs import UnitCost, estimate_unit_costs
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.without_memory import parameters_without_memory

CPU = torch.device("cpu")
SECONDS = 12.0


class WithLoss(nn.Module):
    """A model of transformers, which returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(**batch).loss
        return loss


def reached_flops_per_s(size: int = 1024) -> float:
    """What a product of square float32 matrices reaches."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _seconds(lambda: left @ right)


def reached_bytes_per_s(num_bytes: int = 256 << 20) -> float:
    """What a copy reaches, read and written."""
    source = torch.zeros(num_bytes // 4)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times[2:])


def misplaced(costs: Mapping[str, UnitCost], measured: Mapping[str, UnitCost]) -> float:
    """The part of the work that ``costs`` have on the wrong units."""
    whole, whole_measured = (sum(cost.total for cost in each.values()) for each in (costs, measured))
    return 0.5 * sum(abs(costs[unit].total / whole - measured[unit].total / whole_measured) for unit in measured)


def models() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]]:
    """Name to what builds it and a microbatch."""
    ids = torch.randint(0, 30000, (2, 256))
    text = {"input_ids": ids, "labels": ids}
    images = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 10, (4,))}

    def llama(words: int) -> Callable[[], nn.Module]:
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
        config = hf.LlamaConfig(vocab_size=words, **shape)
        return lambda: hf.LlamaForCausalLM(config)

    gpt2 = hf.GPT2Config(vocab_size=50257, n_embd=512, n_layer=6, n_head=8)
    t5 = hf.T5Config(
        decoder_start_token_id=0, vocab_size=32128, d_model=512, d_ff=1024, d_kv=64, num_heads=8, num_layers=4
    )
    vit = hf.ViTConfig(
        num_labels=10, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6
    )
    return {
        "GPT-2, 50,257 words": (lambda: hf.GPT2LMHeadModel(gpt2), text),
        "Llama, 32,000 words": (llama(32000), text),
        "Llama, 128,000 words": (llama(128000), text),
        "T5, 32,128 words": (lambda: hf.T5ForConditionalGeneration(t5), text),
        "ViT": (lambda: hf.ViTForImageClassification(vit), images),
    }


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    flops, moved = reached_flops_per_s(), reached_bytes_per_s()
    print(f"{flops / 1e9:.0f} GFLOP/s, {moved / 1e9:.1f} GB/s: {flops / moved:.1f} FLOPs in the time of a byte\n")
    print(
        "| model | distinct units | by FLOPs, on the wrong units | by FLOPs or bytes | first unit: measured, by each |"
    )
    print("|---|---|---|---|---|")
    for name, (build, batch) in models().items():
        torch.manual_seed(0)
        with parameters_without_memory():
            module = WithLoss(build()).train()

        def step(dry: DryRun, module: WithLoss = module, batch: dict[str, Tensor] = batch) -> Tensor:
            return module.training_step(batch)

        recording = record_model(module, device=CPU, step=step, with_gradients=True, patterns=None, num_stages=4)
        times = UnitTimes(step, CPU, SECONDS)
        times.of(recording)
        measured = times.costs
        estimates = [
            estimate_unit_costs(recording.record, recording.num_parameters, ratio) for ratio in (0.0, flops / moved)
        ]
        wrong = " | ".join(f"{100 * misplaced(costs, measured):.1f} %" for costs in estimates)
        first = next(iter(measured))
        shares = [
            100 * costs[first].total / sum(cost.total for cost in costs.values()) for costs in (measured, *estimates)
        ]
        told = " / ".join(f"{share:.1f} %" for share in shares)
        print(f"| {name} | {times.num_measured} of {len(measured)} | {wrong} | {told} |", flush=True)


if __name__ == "__main__":
    main()
