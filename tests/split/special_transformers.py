"""Architectures of transformers with configs of their own: sequence to sequence, vision, sound, time series, pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from many_transformers import VOCAB, Case, images, padded, tokens, whole
from torch import Tensor

CASES: dict[str, Case] = {}


def case(name: str, model: str, batch: Callable[[int], Any], **options: Any) -> None:
    model_class = getattr(hf, model)
    CASES[name] = Case(lambda: whole(model_class, model_class.config_class(**options)), batch)


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
