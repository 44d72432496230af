"""Architectures of many kinds, none of which knows of pipelines.

``ARCHITECTURES`` maps a name to what makes the model and what makes a batch of some samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import composed_models as composed
import flow_models as flow
import text_models as text
import torch
import vision_models as vision
from model_parts import doubled, image_batch, pair_batch, regression_batch, tokens_of
from torch import nn

Entry = tuple[Callable[[], nn.Module], Callable[[int], Any]]

ARCHITECTURES: dict[str, Entry] = {
    "residual_mlp": (composed.ResidualMLP, regression_batch),
    "encoder_decoder": (text.EncoderDecoder, text.translation_batch),
    "resnet": (vision.ResNet, image_batch),
    "resnet_batch_statistics": (vision.TrainedResNet, image_batch),
    "unet": (vision.UNet, lambda count: {"image": torch.randn(count, 3, 8, 8)}),
    "mixer": (vision.Mixer, image_batch),
    "mixture_of_experts": (text.MixtureOfExperts, tokens_of),
    "state_space": (text.StateSpace, tokens_of),
    "recurrent": (text.Recurrent, tokens_of),
    "two_towers": (vision.TwoTowers, pair_batch),
    "teacher_student": (composed.TeacherStudent, tokens_of),
    "shared_block": (text.SharedBlock, tokens_of),
    "shared_in_list": (text.SharedInList, tokens_of),
    "separate_lists": (text.SeparateLists, tokens_of),
    "root_parameters": (vision.RootParameters, image_batch),
    "tied_by_hand": (text.TiedByHand, tokens_of),
    "tied_modules": (text.TiedModules, tokens_of),
    "in_place_edits": (flow.InPlaceEdits, tokens_of),
    "structured": (flow.Structured, flow.masked_batch),
    "quantized": (flow.Quantized, regression_batch),
    "deep_supervision": (flow.DeepSupervision, tokens_of),
    "checkpointed": (text.Checkpointed, tokens_of),
    "masked_loss": (flow.MaskedLoss, flow.labelled_batch),
    "methods": (composed.Methods, regression_batch),
    "frozen_trunk": (text.FrozenTrunk, tokens_of),
    "momentum_target": (composed.Momentum, regression_batch),
    "aliased": (flow.Aliased, tokens_of),
    "fusion": (vision.Fusion, pair_batch),
    "sequential": (composed.Mlp, regression_batch),
    "plain": (composed.Plain, regression_batch),
    "wrapped": (composed.Wrapped, regression_batch),
}


def batches_of(name: str, sizes: tuple[int, ...] = (3, 2)) -> list[Any]:
    """Batches of ``sizes`` samples for the architecture ``name``."""
    torch.manual_seed(7)
    return [doubled(ARCHITECTURES[name][1](size)) for size in sizes]
