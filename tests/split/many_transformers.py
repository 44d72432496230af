"""Architectures of transformers made small from their own default configs; nobody chose their details."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from one_process import Architecture
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from lightning_pp.split.data.tree import tensors_of

VOCAB = 64
LENGTH = 8
# what any of these is called in some config, where the default is large
_WIDTHS = {
    16: "hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim lru_width moe_intermediate_size "
    "shared_expert_intermediate_size image_size",
    24: "intermediate_size ffn_dim d_ff ffn_hidden_size n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim",
    64: "vocab_size max_position_embeddings n_positions max_seq_len",
    8: "d_kv head_dim q_lora_rank kv_lora_rank v_head_dim mamba_d_head mamba_head_dim relative_attention_num_buckets",
    4: "num_hidden_layers n_layer n_layers num_layers num_local_experts num_experts n_routed_experts moe_num_experts "
    "qk_rope_head_dim qk_nope_head_dim state_size ssm_state_size mamba_d_state mamba_n_heads mamba_num_heads "
    "mamba_chunk_size chunk_size mamba_dt_rank conv_kernel patch_size window_size attention_window sliding_window "
    "attention_window_size",
    3: "encoder_layers decoder_layers num_decoder_layers num_channels",
    2: "num_attention_heads n_head n_heads num_heads num_key_value_heads encoder_attention_heads "
    "decoder_attention_heads num_experts_per_tok moe_k mamba_expand n_mamba_heads expand eos_token_id type_vocab_size",
    1: "n_group topk_group first_k_dense_replace mamba_n_groups n_groups bos_token_id decoder_start_token_id "
    "num_sparse_encoder_layers num_sparse_decoder_layers",
    0: "pad_token_id",
    5: "num_labels",
}
SMALL: dict[str, Any] = {name: width for width, names in _WIDTHS.items() for name in names.split()}
SMALL |= {"use_mamba_kernels": False, "use_cache": False}
_NOISE = ("router_jitter_noise", "jitter_noise", "mask_time_prob", "mask_feature_prob")

_NAMES = {
    "causal": """
        apertus aria_text axk2 bailing_hybrid bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet
        blenderbot blenderbot-small camembert cohere cohere2 cohere2_moe cpmant ctrl cwm data2vec-text
        deepseek_v2 deepseek_v32 deepseek_v4 diffllama doge electra emu3 ernie ernie4_5 ernie4_5_moe exaone4
        exaone_moe falcon falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite
        glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite granitemoe granitemoehybrid
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe lfm2 llama llama4_text mamba mamba2
        marian mbart megatron-bert minicpm3 minimax minimax_m2 ministral mistral mixtral modernbert-decoder mpt
        mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi
        phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rembert
        roberta roberta-prelayernorm roformer rwkv seed_oss smollm3 stablelm starcoder2 trocr vaultgemma whisper
        xlm xlm-roberta xlm-roberta-xl xlstm
    """,
    "masked": """
        albert bart convbert deberta deberta-v2 distilbert esm eurobert flaubert fnet ibert layoutlm longformer
        modernbert nomic_bert nystromformer squeezebert tapas
    """,
    "image": "beit clip data2vec-vision deit dinov2 dinov2_with_registers",
}
MODEL_TYPES = {task: names.split() for task, names in _NAMES.items()}
_CLASSES = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


class Whole(Architecture):
    """A model that computes its loss itself; where it has none, the mean squares of all that it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any) -> Tensor:
        output = self.model(**batch)
        loss = output.get("loss")
        if loss is None:
            loss = sum(leaf.square().mean() for leaf in tensors_of(output) if leaf.is_floating_point())
        self.log("loss", loss)
        return loss


def tokens(count: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (count, length))


def padded(count: int) -> dict[str, Tensor]:
    mask = (torch.arange(LENGTH) < torch.arange(count).unsqueeze(1) % 3 + 5).long()
    text = tokens(count)
    return {"input_ids": text * mask, "attention_mask": mask, "labels": torch.where(mask == 1, text, -100)}


def images(count: int, size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(0, 5, (count,))}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]


def whole(model_class: Any, config: Any) -> nn.Module:
    """The model without any dropout or noise, so that two runs of it are the same."""
    model = model_class(_without_noise(config))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Whole(model)


def generic(task: str, model_type: str) -> Case:
    """The architecture of that type, with small numbers wherever its default config has large ones."""
    name = _CLASSES[task][model_type]
    model_class = getattr(hf, name if isinstance(name, str) else name[0])
    batch = images if task == "image" else padded
    return Case(lambda: whole(model_class, _small(model_class.config_class)), batch)


def _small(config_class: Any) -> Any:
    try:
        default = config_class()
    except Exception:  # some need arguments
        default = None
    aliases = getattr(config_class, "attribute_map", {})
    options = {key: value for key, value in SMALL.items() if default is None or hasattr(default, key) or key in aliases}
    options = {key: value for key, value in options.items() if not _is_computed(config_class, key)}
    if "mamba2" in config_class.model_type:
        options["num_heads"] = 4
    for part, part_class in config_class.sub_configs.items():
        if hasattr(part_class, "model_type"):
            options[part] = _small(part_class).to_dict()
    return config_class(**options)


def _is_computed(config_class: Any, key: str) -> bool:
    declared = getattr(config_class, key, None)
    return isinstance(declared, property) and declared.fset is None


def _without_noise(config: Any) -> Any:
    for key, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            _without_noise(value)
        elif isinstance(value, float) and ("drop" in key or key in _NOISE):
            setattr(config, key, 0.0)
    config._experts_implementation = "eager"  # the grouped product knows no float64
    return config
