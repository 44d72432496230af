"""The default recipe's model, by itself."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.recipes.optimization import warmup_cosine


def test_default_size_and_first_loss() -> None:
    torch.manual_seed(0)
    model = ByteGPT()
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    with torch.no_grad():
        loss = model._loss({"input_ids": torch.randint(0, 256, (2, 32))})
    assert loss.item() == pytest.approx(math.log(256), abs=0.15)


def test_no_position_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = ByteGPT(num_layers=2, dim=16, num_heads=2).eval()
    text = torch.randint(0, 256, (1, 12))
    changed = text.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    with torch.no_grad():
        before, after = model(text), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="dim=10 is not divisible by num_heads=4"):
        ByteGPT(dim=10, num_heads=4)
    with pytest.raises(ValueError, match="sequences of 9 bytes, but the model has 8 positions"):
        ByteGPT(num_layers=1, dim=8, num_heads=1, max_seq_len=8)(torch.zeros(1, 9, dtype=torch.int64))


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    factors = [warmup_cosine(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)
    assert warmup_cosine(1000, 10, 100) == pytest.approx(0.1)
