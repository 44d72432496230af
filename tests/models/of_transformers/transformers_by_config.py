"""Models of transformers by their configs.

``generic`` makes a type small by its own default config, whose details nobody chose; ``CASES`` have configs of their
own: sequence to sequence, vision, sound, time series, pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from model_parts import Architecture
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


CASES: dict[str, Case] = {}


def case(name: str, model: str, batch: Callable[[int], Any], **options: Any) -> None:
    def make() -> nn.Module:
        model_class = getattr(hf, model)  # imports it, which takes a while
        return whole(model_class, model_class.config_class(**options))

    CASES[name] = Case(make, batch)


def translated(count: int) -> dict[str, Tensor]:
    return {**padded(count), "labels": tokens(count, 5)}


def large_images(count: int) -> dict[str, Tensor]:
    return images(count, 32)


def detected(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 64, 64), "pixel_mask": torch.ones(count, 64, 64, dtype=torch.long)}


def sounds(count: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(count, 160), "labels": torch.randint(1, VOCAB, (count, 3))}


def captioned(count: int) -> dict[str, Any]:
    text = torch.cat([tokens(count, 7).clamp(max=VOCAB - 2), torch.full((count, 1), VOCAB - 1)], dim=1)
    return {"input_ids": text, "pixel_values": torch.randn(count, 3, 16, 16), "return_loss": torch.tensor(True)}


def series(count: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.rand(count, 17),
        "past_time_features": torch.rand(count, 17, 2),
        "past_observed_mask": torch.ones(count, 17),
        "future_values": torch.rand(count, 4),
        "future_time_features": torch.rand(count, 4, 2),
    }


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IMAGE: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_labels": 5,
}
STAGES: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "num_labels": 5}
T5: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
T5 |= {"num_decoder_layers": 3, "decoder_start_token_id": 0, "pad_token_id": 0}
HALVES: dict[str, Any] = {
    f"{half}_{key}": value
    for half in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 24}.items()
}
EXPERTS: dict[str, Any] = {"num_experts": 3, "expert_capacity": 8}
LATENT: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
SPEECH: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4)}
SPEECH |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SPEECH |= {"apply_spec_augment": False, "layerdrop": 0.0, "ctc_loss_reduction": "mean"}
FORECAST: dict[str, Any] = {"prediction_length": 4, "context_length": 10, "lags_sequence": [1, 2, 7]}
FORECAST |= {"num_time_features": 2, "d_model": 16, **HALVES}
BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}

case("mixtral_with_cache", "MixtralForCausalLM", padded, **TEXT, num_key_value_heads=1, num_local_experts=3)
case("deepseek_v3", "DeepseekV3ForCausalLM", padded, **TEXT, **LATENT, n_group=2, topk_group=1, first_k_dense_replace=1)
case("gptj", "GPTJForCausalLM", padded, vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=4, n_head=2, rotary_dim=4)
case("xlnet", "XLNetLMHeadModel", padded, vocab_size=VOCAB, d_model=16, n_layer=4, n_head=2, d_inner=24)
case(
    "t5_v1_1", "T5ForConditionalGeneration", translated, **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
)
case("umt5", "UMT5ForConditionalGeneration", translated, **T5)
case("longt5", "LongT5ForConditionalGeneration", translated, **T5, encoder_attention_type="local", local_radius=3)
case(
    "switch",
    "SwitchTransformersForConditionalGeneration",
    translated,
    **T5,
    **EXPERTS,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)
case(
    "nllb_moe",
    "NllbMoeForConditionalGeneration",
    translated,
    **HALVES,
    **EXPERTS,
    vocab_size=VOCAB,
    d_model=16,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
)
case(
    "funnel",
    "FunnelForMaskedLM",
    padded,
    vocab_size=VOCAB,
    block_sizes=[1, 2, 1],
    d_model=16,
    n_head=2,
    d_head=8,
    d_inner=24,
)
case("resnet", "ResNetForImageClassification", images, embedding_size=8, **STAGES)
case("regnet", "RegNetForImageClassification", images, embedding_size=8, **STAGES, groups_width=4)
case("convnext_v2", "ConvNextV2ForImageClassification", large_images, **STAGES, patch_size=2)
case("poolformer", "PoolFormerForImageClassification", large_images, **STAGES)
case(
    "swin_v2",
    "Swinv2ForImageClassification",
    images,
    image_size=16,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=2,
    num_labels=5,
)
case(
    "segformer",
    "SegformerForSemanticSegmentation",
    lambda count: {**large_images(count), "labels": torch.randint(0, 5, (count, 32, 32))},
    **STAGES,
    num_attention_heads=[1, 1, 2, 2],
    sr_ratios=[4, 2, 1, 1],
    decoder_hidden_size=8,
)
case(
    "detr",
    "DetrForObjectDetection",
    detected,
    **HALVES,
    num_queries=4,
    d_model=16,
    backbone_config=hf.ResNetConfig(**BACKBONE, out_features=["stage4"]),
)
case(
    "vit_mae",
    "ViTMAEForPreTraining",
    lambda count: {"pixel_values": torch.randn(count, 3, 16, 16), "noise": torch.rand(count, 16)},
    **IMAGE,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=24,
)
case(
    "timesformer",
    "TimesformerForVideoClassification",
    lambda count: {"pixel_values": torch.randn(count, 4, 3, 16, 16), "labels": torch.randint(0, 5, (count,))},
    **IMAGE,
    num_frames=4,
)
case("hubert", "HubertForCTC", sounds, **{**TEXT, **SPEECH})
case("wavlm", "WavLMForCTC", sounds, **{**TEXT, **SPEECH})
case(
    "whisper",
    "WhisperForConditionalGeneration",
    lambda count: {"input_features": torch.randn(count, 8, 20), "labels": tokens(count, 5)},
    **HALVES,
    vocab_size=VOCAB,
    d_model=16,
    num_mel_bins=8,
    max_source_positions=10,
    max_target_positions=10,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
case("time_series_transformer", "TimeSeriesTransformerForPrediction", series, **FORECAST)
case("informer", "InformerForPrediction", series, **FORECAST)
case(
    "patchtst",
    "PatchTSTForPrediction",
    lambda count: {"past_values": torch.randn(count, 16, 3), "future_values": torch.randn(count, 4, 3)},
    num_input_channels=3,
    context_length=16,
    patch_length=4,
    patch_stride=4,
    prediction_length=4,
    d_model=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    ffn_dim=24,
    loss="mse",
)
case(
    "siglip",
    "SiglipModel",
    captioned,
    text_config={**TEXT, "max_position_embeddings": 8, "projection_size": 16},
    vision_config=IMAGE,
)
case(
    "clip",
    "CLIPModel",
    captioned,
    text_config={**TEXT, "eos_token_id": VOCAB - 1},
    vision_config=IMAGE,
    projection_dim=8,
)
