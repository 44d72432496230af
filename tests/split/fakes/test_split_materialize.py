"""Parameters and buffers that were made on the meta device get memory and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers_by_hand
from one_process import CPU
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.fakes.materialize import materialize_buffers, materialize_parameters
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.fakes.without_memory import parameters_without_memory


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def materialized(make: Any, owned: set[str] | None = None) -> nn.Module:
    module = on_meta(make)
    materialize_buffers(module, CPU)
    materialize_parameters(module, set(dict(module.named_parameters())) if owned is None else owned, CPU)
    return module


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(9, 8)
    )


def spread(module: nn.Module) -> dict[str, tuple[float, float]]:
    return {
        name: (float(p.detach().double().mean()), float(p.detach().double().std()))
        for name, p in module.named_parameters()
        if p.numel() > 8
    }


def test_reset_parameters_fills_plain_layers() -> None:
    torch.manual_seed(0)
    module = materialized(plain)
    assert not any(p.is_meta for p in module.parameters())
    assert torch.equal(module[1].weight, torch.ones(8)) and torch.equal(module[1].running_var, torch.ones(8))
    assert module[1].num_batches_tracked == 0
    for name, (mean, std) in spread(plain()).items():
        found = spread(module)[name]
        assert found == pytest.approx((mean, std), abs=0.35), name
        assert found[1] > 0


def test_attention_and_recurrent_layers() -> None:
    module = materialized(lambda: nn.ModuleList([nn.MultiheadAttention(8, 2), nn.GRU(4, 8), nn.LSTM(4, 8)]))
    assert torch.equal(module[0].in_proj_bias, torch.zeros(24))
    assert all(0 < p.abs().max() <= 8**-0.5 for p in module[1].parameters())
    out, _ = module[2](torch.randn(3, 1, 4))
    assert torch.isfinite(out).all()


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "bert", "mixtral", "vit", "swin"])
def test_models_of_transformers_are_filled_as_they_fill_themselves(name: str) -> None:
    """Also where a module around says how (T5's attention, the last projections of GPT-2)."""
    torch.manual_seed(0)
    real = transformers_by_hand.ARCHITECTURES[name][0]()
    module = materialized(transformers_by_hand.ARCHITECTURES[name][0])
    found = spread(module)
    for key, (mean, std) in spread(real).items():
        assert found[key][1] == pytest.approx(std, rel=0.5, abs=2e-3), key
        assert found[key][0] == pytest.approx(mean, abs=0.1 + std), key
    for (key, buffer), (_, other) in zip(real.named_buffers(), module.named_buffers(), strict=True):
        assert torch.equal(buffer, other), key
    assert [key for key, _ in module.named_parameters()] == [key for key, _ in real.named_parameters()]


def test_tied_parameters_stay_tied() -> None:
    module = materialized(transformers_by_hand.gpt2)
    assert module.model.lm_head.weight is module.model.transformer.wte.weight


def test_only_what_is_owned_gets_memory() -> None:
    module = on_meta(transformers_by_hand.gpt2)
    materialize_buffers(module, CPU)
    fake_parameters = FakeParameters(module, CPU)
    owned = {name for name in fake_parameters.names if ".h.2." in name or "wte" in name}
    fake_parameters.release(owned)
    materialize_parameters(module, owned, CPU)
    assert {name for name, _ in module.named_parameters()} == owned - {"model.lm_head.weight"}
    assert not any(p.is_meta or is_fake(p) for p in module.parameters())
    assert is_fake(module.model.transformer.h[1].mlp.c_fc.weight)


def test_values_depend_on_the_seed_and_the_name_not_on_the_stage() -> None:
    def values(owned: set[str], seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        module = on_meta(transformers_by_hand.gpt2)
        fake_parameters = FakeParameters(module, CPU)
        materialize_buffers(module, CPU)
        fake_parameters.release(owned)
        torch.rand(len(owned))  # stages have drawn differently by now
        torch.manual_seed(seed)
        materialize_parameters(module, owned, CPU)
        return {name: p.detach() for name, p in module.named_parameters()}

    names = [name for name, _ in on_meta(transformers_by_hand.gpt2).named_parameters()]
    layer = {name for name in names if ".h.1." in name}
    whole, part = values(set(names), 3), values(layer, 3)
    assert all(torch.equal(whole[name], part[name]) for name in layer)
    key = "model.transformer.h.1.mlp.c_fc.weight"
    assert not torch.equal(whole[key], whole[key.replace("h.1", "h.2")])
    assert not torch.equal(whole[key], values(layer, 4)[key])


def test_what_is_there_already_and_the_generator_are_left_alone() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loaded = nn.Linear(4, 4, device="cpu")
            self.new = nn.Linear(4, 4)
            self.register_buffer("kept", torch.full((3,), 7.0, device="cpu"))

        def _init_weights(self, module: nn.Module) -> None:
            for held in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                nn.init.normal_(held)

    module = on_meta(Mixed)
    before, loaded = module.loaded.weight.detach().clone(), module.loaded.weight
    state = torch.get_rng_state()
    materialize_buffers(module, CPU)
    materialize_parameters(module, set(dict(module.named_parameters())), CPU)
    assert module.loaded.weight is loaded and torch.equal(loaded, before)
    assert torch.equal(module.kept, torch.full((3,), 7.0))
    assert torch.isfinite(module.new.weight).all()
    assert torch.equal(torch.get_rng_state(), state)


class Unfilled(nn.Module):
    """Nothing says how to fill it."""

    def __init__(self, buffer: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("table", torch.ones(3, dtype=dtype))
        else:
            self.table = nn.Parameter(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_nothing_fills_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=r"'table' of 0 \(Unfilled\).*reset_parameters"):
        materialized(lambda: nn.Sequential(Unfilled(dtype=dtype), nn.Linear(2, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nothing_fills_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=r"'table' of 0 \(Unfilled\)"):
        materialized(lambda: nn.Sequential(Unfilled(True, dtype)))


def test_an_initialiser_that_forgets_a_parameter_is_found_out() -> None:
    with pytest.raises(ConfigurationError, match=r"'original0' of .*parametrizations.weight"):
        materialized(transformers_by_hand.wav2vec2)


def test_an_initialiser_without_arguments() -> None:
    class Own(Unfilled):
        def _init_weights(self) -> None:
            nn.init.constant_(self.table, 2.0)

    assert torch.equal(materialized(Own).table, torch.full((3,), 2.0))


def test_nothing_on_meta_is_nothing_to_do() -> None:
    module = Unfilled()
    table = module.table
    materialize_buffers(module, CPU)
    materialize_parameters(module, {"table"}, CPU)
    assert module.table is table and torch.equal(table, torch.ones(3))


class MarkedParameter(nn.Parameter):
    """A parameter of a class of its own."""


def test_parameters_made_without_memory_keep_class_attributes_and_ties() -> None:
    marked = MarkedParameter(torch.rand(3, 2).t(), requires_grad=False)
    marked.mark = "mine"  # type: ignore[attr-defined]
    with parameters_without_memory():
        first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        first.weight = second.weight = marked
        first.register_buffer("seen", torch.ones(2))
    weight = first.weight
    assert weight is second.weight and weight.is_meta and first.bias.is_meta and not first.seen.is_meta
    assert type(weight) is MarkedParameter and weight.mark == "mine"  # type: ignore[attr-defined]
    assert weight.shape == marked.shape and weight.stride() == marked.stride() and not weight.requires_grad
    assert type(first.bias) is nn.Parameter and first.bias.requires_grad
    assert not nn.Linear(3, 2).weight.is_meta
