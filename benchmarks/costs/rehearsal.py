"""What a rehearsal of the code between units costs for a microbatch, beside a real step on it.

A step that may go by more than shapes is rehearsed before it runs. Times are CPU times of this process, medians of many
runs. The real step is forward and backward of one microbatch on one device, of the same model.

    python benchmarks/costs/rehearsal.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import transformers as hf
from cut_models import HFModel, cut, gpt2, llama, median_ms
from torch import Tensor

from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.split.dry_run.same_path import PathComparison


class Masked(HFModel):
    """A model of transformers on padded rows: whether the mask masks anything is read by Python."""

    def training_step(self, batch: Tensor) -> Tensor:
        """Next-token loss."""
        mask = torch.ones_like(batch)
        mask[0, : batch.shape[1] // 4] = 0
        loss: Tensor = self.model(input_ids=batch, attention_mask=mask, labels=batch).loss
        return loss


class Bytes(ByteGPT):
    """The recipes' GPT, without what it logs."""

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Next-byte loss."""
        return self._loss({"input_ids": batch})


def row(name: str, module: L.LightningModule, batch: Tensor, num_runs: int) -> str:
    """A row of the table."""
    split = cut(module, batch, 4)

    def step(_: Any = None) -> Any:
        return module.training_step(batch)

    record = split.plans.plan(signature_of(batch), step, with_gradients=True).record
    paths = PathComparison(module, split.units, split.fake_parameters)

    def rehearse() -> bool:
        return paths.followed(record, step, lambda _: None) is record

    assert rehearse()
    rehearsal, real = median_ms(rehearse, num_runs), median_ms(lambda: step().backward(), max(3, num_runs // 10))
    return f"| {name} | {len(record.calls)} | {rehearsal:.2f} | {real:.0f} | {100 * rehearsal / real:.1f} |"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | unit calls | rehearsal, ms | real step, ms | rehearsal, % |")
    print("|---|---|---|---|---|")
    tiny, small = torch.randint(0, 256, (2, 32)), torch.randint(0, 256, (1, 128))
    large = hf.GPT2Config(n_layer=12, vocab_size=50257)
    models: list[tuple[str, Callable[[], L.LightningModule], Tensor]] = [
        ("GPT-2, 48 blocks of width 32, 2 × 32 tokens", lambda: Masked(gpt2(48, 32).model), tiny),
        ("Llama, 48 blocks of width 32, 2 × 32 tokens", lambda: Masked(llama(48, 32).model), tiny),
        ("GPT-2, 124 million parameters, 1 × 128 tokens", lambda: Masked(hf.GPT2LMHeadModel(large)), small),
        ("the recipes' byte GPT, 4 × 128 bytes", Bytes, torch.randint(0, 256, (4, 129))),
    ]
    for name, make, batch in models:
        print(row(name, make(), batch, args.runs), flush=True)


if __name__ == "__main__":
    main()
