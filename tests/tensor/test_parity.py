"""Units on tensor ranks compute what they compute on one device: results and all gradients, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from tensor_run import compare

from lightning_pp.tensor.units import TensorParallelUnits

QKV, MLP = ("attn.qkv.weight", "attn.qkv.bias", "attn.out.weight"), ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight")
SELF = ("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight")
CROSS = tuple(name.replace("self_attn", "multihead_attn") for name in SELF)
LAYER = ("linear1.weight", "linear1.bias", "linear2.weight")
GATES = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
LLAMA = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
CONV1D = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight")
T5 = tuple(f"layer.0.SelfAttention.{name}.weight" for name in "qkvo")
# what "auto" cuts on two ranks
CUT: dict[str, Sequence[str]] = {
    "block": QKV + MLP,
    "viewed": QKV + MLP,
    "gated": ("up.weight", "down.weight"),
    "experts": QKV + tuple(f"experts.{i}.{name}" for i in range(3) for name in ("0.weight", "0.bias", "2.weight")),
    "encoder_layer": SELF + LAYER,
    "encoder_layer_padded_first": SELF + LAYER,
    "decoder_layer": SELF + CROSS + LAYER,
    "multihead": ("in_proj_weight", "in_proj_bias", "out_proj.weight"),
    "llama": LLAMA + GATES,
    "llama-eager": LLAMA + GATES,
    "llama_one_key_head": (LLAMA[0], LLAMA[3], *GATES),
    "llama_one_key_head-eager": (LLAMA[0], LLAMA[3], *GATES),
    "phi3": ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
    "gpt2": (*CONV1D, "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight"),
    "gpt2-eager": (*CONV1D, "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight"),
    "t5": T5 + tuple(f"layer.1.DenseReluDense.{name}.weight" for name in ("wi_0", "wi_1", "wo")),
    "vit": (
        *(f"attention.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
        *("attention.o_proj.weight", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"),
    ),
}


def compare_all(names: Sequence[str], sequence_parallel: bool = False) -> dict[str, dict[str, Any]]:
    return {name: compare(name, sequence_parallel=sequence_parallel) for name in names}


NAMES = list(CUT)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("names", [NAMES[:8], NAMES[8:]], ids=["own-and-torch", "transformers"])
def test_auto_on_two_ranks(names: list[str], sequence_parallel: bool, pool: WorkerPool) -> None:
    for outcomes in pool.run(compare_all, names, sequence_parallel, process_group=True, timeout=120):
        for name, outcome in outcomes.items():
            assert {key.removeprefix("unit.") for key in outcome["parts"]} == set(CUT[name]), name
            assert outcome["error"] < 1e-9, name


MIXTURES = [
    f"{kind}-{how}" for kind in ("mixtral", "qwen3_moe", "gpt_oss") for how in ("eager", "batched_mm", "grouped_mm")
]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_matrices_of_all_experts_in_one_parameter(sequence_parallel: bool, pool: WorkerPool) -> None:
    for outcomes in pool.run(compare_all, MIXTURES, sequence_parallel, process_group=True, timeout=120):
        for name, outcome in outcomes.items():
            inner = outcome["parts"]["unit.experts.down_proj"]
            assert {key.removeprefix("unit.experts.") for key in outcome["parts"]} == {"gate_up_proj", "down_proj"}
            assert inner.dim == (1 if name.startswith("gpt_oss") else 2) and inner.shape[inner.dim] == 16, name
            rounding = 0.02 * outcome["largest"] if name.endswith("grouped_mm") else 1e-9  # the first are in bfloat16
            assert outcome["error"] < rounding, name
            router = "unit.router.weight" if name.startswith("gpt_oss") else "unit.gate.weight"
            assert router in outcome["report"], name


def test_a_dict_of_patterns_for_experts(pool: WorkerPool) -> None:
    plan = {"*.experts.gate_up_proj": "colwise", "*.experts.down_proj": "rowwise"}
    for outcome in pool.run(compare, "mixtral-batched_mm", plan, process_group=True, timeout=120):
        gates = outcome["parts"]["unit.experts.gate_up_proj"]
        assert len(gates.pieces) == 2, "gates and values are cut each"
        assert outcome["error"] < 1e-9


def test_experts_of_an_odd_width_stay_whole_and_are_told(pool: WorkerPool) -> None:
    for outcome in pool.run(compare, "mixtral_odd-batched_mm", process_group=True, timeout=120):
        assert not outcome["parts"] and outcome["error"] < 1e-9
        assert "leaves 100.0% of the parameters whole" in outcome["report"]
        assert "unit.experts.gate_up_proj, unit.experts.down_proj" in outcome["report"]


def test_auto_on_four_ranks(pool: WorkerPool) -> None:
    names = ["block", "gated", "encoder_layer", "llama", "gpt2", "t5", "experts"]
    for outcomes in pool.run(compare_all, names, world_size=4, process_group=True, timeout=120):
        for name, outcome in outcomes.items():
            cut = set(CUT[name])
            if name == "llama":  # two key heads for four ranks: each has a query head and the key head for it
                cut -= set(LLAMA[1:3])
            assert {key.removeprefix("unit.") for key in outcome["parts"]} == cut, name
            assert outcome["error"] < 1e-9, name


LLAMA_PLAN = {
    **dict.fromkeys(["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"], "colwise"),
    **dict.fromkeys(["*.o_proj", "*.down_proj"], "rowwise"),
}


@pytest.mark.parametrize("observes", [True, False])
def test_a_dict_of_patterns(observes: bool, pool: WorkerPool) -> None:
    for outcome in pool.run(compare, "llama", LLAMA_PLAN, observes, process_group=True):
        assert {key.removeprefix("unit.") for key in outcome["parts"]} == set(CUT["llama"])
        assert outcome["error"] < 1e-9


def test_a_plan_for_a_part_leaves_the_rest_whole(pool: WorkerPool) -> None:
    plan = {"unit.mlp.0": "colwise", "unit.mlp.2": "rowwise"}
    for outcome in pool.run(compare, "block", plan, process_group=True):
        assert {key.removeprefix("unit.") for key in outcome["parts"]} == set(MLP)
        assert outcome["error"] < 1e-9
        assert "unit.attn.qkv.weight, unit.attn.out.weight" in outcome["report"]


def test_a_fused_projection_is_cut_by_the_code_that_splits_it(pool: WorkerPool) -> None:
    plan = {"*.qkv": "colwise", "*.out": "rowwise"}
    for rank, outcome in enumerate(pool.run(compare, "block", plan, process_group=True)):
        part = outcome["parts"]["unit.attn.qkv.weight"]
        assert part.pieces == tuple((start + 8 * rank, start + 8 * rank + 8) for start in (0, 16, 32))
        assert outcome["error"] < 1e-9


def own_plan() -> tuple[set[str], str, float]:
    """A Llama of which no call was observed."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).double()
    tokens = torch.arange(12).view(2, 6)
    wanted = model(tokens).logits
    names = [name for name, _ in model.named_modules() if name in ("lm_head", "model.layers.0", "model.layers.1")]
    assert dist.group.WORLD is not None
    units = TensorParallelUnits(model, {n: model.get_submodule(n) for n in names}, "auto", dist.group.WORLD)
    units.shard()
    units.check_next_calls()
    return set(units.parts), units.report(), (model(tokens).logits - wanted).abs().max().item()


def test_without_observed_calls_the_plan_of_the_model_is_used(pool: WorkerPool) -> None:
    wanted = {f"model.layers.{i}.{name}" for i in range(2) for name in (*LLAMA, *GATES)}
    for parts, report, error in pool.run(own_plan, process_group=True):
        assert parts == wanted
        assert "Styles of the model's own plan that are not used: colwise_gather_output" in report
        assert "lm_head.weight" in report
        assert error < 1e-9
