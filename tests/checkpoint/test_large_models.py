"""Models that no process holds whole: each rank holds its own units, and starts from weights of any kind of file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pipelined_fit import trainer
from pool import WorkerPool
from torch.utils.data import DataLoader, StackDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.recipes.causal_lm import CausalLM

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory" / "large_models.py"
CONFIG = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("large_models", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def set_up(layout: tuple[int, int, str], weights: Path | None) -> dict[str, float]:
    large_models = benchmark()
    config = {**large_models.LLAMA_REAL, "num_hidden_layers": 24}
    figures: dict[str, float] = large_models.in_real_memory(layout, weights, config)
    return figures


@pytest.mark.parametrize(
    ("pipeline", "replicas", "sharding"),
    [
        pytest.param(2, 2, "full_shard", marks=pytest.mark.nightly),
        pytest.param(1, 4, "full_shard", marks=pytest.mark.nightly),
        pytest.param(1, 4, "replicate", marks=pytest.mark.nightly),
        pytest.param(4, 1, "replicate", marks=pytest.mark.nightly),
    ],
)
def test_a_set_up_peaks_near_its_own_share(pool: WorkerPool, pipeline: int, replicas: int, sharding: str) -> None:
    """27 MiB a block: one is whole at a time, and sharded before the next; the step is recorded without memory."""
    ranks = pool.run(set_up, (pipeline, replicas, sharding), None, world_size=4, timeout=200)
    # 24 blocks of 4 (768 x 768) and 3 (768 x 2048) matrices and 2 norms; embedding, head and the last norm
    whole = 4 * (24 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 2 * 4096 * 768 + 768)
    num_copies = replicas if sharding == "replicate" else 1
    assert sum(rank["own_bytes"] for rank in ranks) == whole * num_copies
    for rank in ranks:
        assert 0.95 * rank["own_bytes"] < rank["added_bytes"] < 1.3 * rank["own_bytes"]


def data() -> DataLoader[Any]:
    tokens = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(3))
    return DataLoader(StackDataset(input_ids=tokens), batch_size=4)


def validated(path: Path, **config: Any) -> tuple[float, int]:
    """Validation loss of the weights at ``path``, and how many parameters this rank had on no real device before."""
    strategy = PipelineParallelStrategy(
        2, num_microbatches=2, meta_init=True, initial_weights=path, check_first_batches=False
    )
    run = trainer(2, strategy, default_root_dir=path.parent)
    pl.seed_everything(1, verbose=False)
    module = CausalLM("gpt2", {**CONFIG, **config})
    (metrics,) = run.validate(module, data(), verbose=False)
    return metrics["val_loss"], sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["directory", "shards", "base_model", "state_dict"])
def test_initial_weights(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    """Hugging Face directories with their own names, whole or in shards; a tied head needs no name of its own."""
    torch.manual_seed(8)
    plain = CausalLM("gpt2", CONFIG)
    plain.configure_model()
    path = tmp_path / "weights"
    if kind == "state_dict":
        path = tmp_path / "weights.pt"
        torch.save(plain.state_dict(), path)
    else:
        model = plain.model.transformer if kind == "base_model" else plain.model
        model.save_pretrained(path, max_shard_size="5KB" if kind == "shards" else "5GB")
    (metrics,) = trainer(1, "auto", default_root_dir=tmp_path).validate(plain, data(), verbose=False)
    results = pool.run(validated, path)
    whole = sum(parameter.numel() for parameter in plain.parameters())
    for loss, num_parameters in results:
        assert abs(loss - metrics["val_loss"]) < 1e-5
        assert num_parameters < whole


def refusal(path: Path) -> list[str]:
    messages = []
    for where, config in ((path, {"n_layer": 3, "vocab_size": 65}), (path / "nothing", {}), (path / "a.pt", {})):
        try:
            validated(where, **config)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_weights_that_do_not_fit(pool: WorkerPool, tmp_path: Path) -> None:
    plain = CausalLM("gpt2", CONFIG)
    plain.configure_model()
    plain.model.save_pretrained(tmp_path)
    torch.save([1, 2], tmp_path / "a.pt")
    first, second = pool.run(refusal, tmp_path)
    assert first == second
    other, missing, nothing = first
    assert "12 of the model's" in other and "are missing: model.transformer.h.2.ln_1.weight" in other
    assert "model.transformer.wte.weight ((64, 16) in the checkpoint, (65, 16) in the model)" in other
    assert f"The weights to start from, {tmp_path / 'nothing'}, do not exist (looked from " in missing
    assert "download a model of a hub first" in missing
    assert "holds no tensors by name" in nothing
