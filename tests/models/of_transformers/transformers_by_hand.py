"""Models of transformers, from tiny configs, with their ordinary losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from model_parts import Architecture, doubled
from torch import Tensor, nn

VOCAB = 32
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


class WithLoss(Architecture):
    """A model that computes its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any) -> Tensor:
        output = self.model(**batch)
        self.log("loss", output.loss)
        return output.loss

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        output = self.model(**batch)
        return {"loss": output.loss, "logits": output.logits}


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return WithLoss(hf.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    return WithLoss(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1)))


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return WithLoss(hf.T5ForConditionalGeneration(config))


def bert() -> nn.Module:
    config = hf.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return WithLoss(hf.BertForMaskedLM(config))


def bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    return WithLoss(hf.BartForConditionalGeneration(config))


def albert() -> nn.Module:
    config = hf.AlbertConfig(**SMALL, embedding_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.classifier_dropout_prob = 0.0
    return WithLoss(hf.AlbertForMaskedLM(config))


class ImageClassifier(Architecture):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any) -> Tensor:
        image, label = batch
        logits = self.model(pixel_values=image).logits
        self.log("accuracy", (logits.argmax(-1) == label).double().mean())
        return F.cross_entropy(logits, label)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        num_labels=5,
    )
    return ImageClassifier(hf.ViTForImageClassification(config))


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(
        hidden_sizes=[4, 6, 8], depths=[1, 2, 1], num_stages=3, patch_size=2, image_size=16, num_labels=5
    )
    return ImageClassifier(hf.ConvNextForImageClassification(config))


def swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=2,
        num_labels=5,
        drop_path_rate=0.0,
    )
    return ImageClassifier(hf.SwinForImageClassification(config))


def mixtral(**options: Any) -> nn.Module:
    experts = {"num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = hf.MixtralConfig(**{**SMALL, **experts, "use_cache": False, **options})
    config._experts_implementation = "eager"  # the grouped product knows no float64
    return WithLoss(hf.MixtralForCausalLM(config))


def mamba() -> nn.Module:
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=4, use_mambapy=False)
    config.use_cache = False
    return WithLoss(hf.MambaForCausalLM(config))


def clip() -> nn.Module:
    text = {**SMALL, "num_hidden_layers": 2, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": VOCAB - 1}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }

    class Contrastive(WithLoss):
        def training_step(self, batch: Any) -> Tensor:
            return self.model(**batch, return_loss=True).loss

        def validation_step(self, batch: Any) -> Any:
            return self.model(**batch).logits_per_image

    return Contrastive(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)))


def wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        ctc_loss_reduction="mean",
    )
    return WithLoss(hf.Wav2Vec2ForCTC(config))


def checkpointed_llama() -> nn.Module:
    module = llama()
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def text_batch(count: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCAB, (count, 7))
    return {"input_ids": tokens, "labels": tokens}


def padded_batch(count: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCAB, (count, 7))
    mask = (torch.arange(7) < torch.arange(count).unsqueeze(1) % 3 + 4).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def pair_batch(count: int) -> dict[str, Tensor]:
    source = padded_batch(count)
    return {**source, "labels": torch.randint(1, VOCAB, (count, 5))}


def image_batch(size: int) -> Callable[[int], list[Tensor]]:
    return lambda count: [torch.randn(count, 3, size, size), torch.randint(0, 5, (count,))]


def captioned_batch(count: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCAB, (count, 7))
    tokens[:, -1] = VOCAB - 1
    return {"input_ids": tokens, "pixel_values": torch.randn(count, 3, 8, 8)}


def audio_batch(count: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(count, 160), "labels": torch.randint(1, VOCAB, (count, 3))}


Entry = tuple[Callable[[], nn.Module], Callable[[int], Any]]

ARCHITECTURES: dict[str, Entry] = {
    "gpt2": (gpt2, text_batch),
    "llama": (llama, padded_batch),
    "checkpointed_llama": (checkpointed_llama, padded_batch),
    "t5": (t5, pair_batch),
    "bart": (bart, pair_batch),
    "bert": (bert, padded_batch),
    "albert": (albert, padded_batch),
    "vit": (vit, image_batch(8)),
    "convnext": (convnext, image_batch(16)),
    "swin": (swin, image_batch(16)),
    "mixtral": (mixtral, padded_batch),
    "mamba": (mamba, text_batch),
    "clip": (clip, captioned_batch),
    "wav2vec2": (wav2vec2, audio_batch),
}


def batches_of(name: str, sizes: tuple[int, ...] = (3, 2)) -> list[Any]:
    """Batches of ``sizes`` samples for the model ``name``."""
    torch.manual_seed(7)
    return [doubled(ARCHITECTURES[name][1](size)) for size in sizes]
