"""What a diagnosis says of weight gradients and links is true: nothing of public models, names of a user's own code."""

from __future__ import annotations

import pytest
from diagnosed_models import findings_of
from pool import WorkerPool

#: Products of all kinds, norms, routers and convolutions; all of their weight gradients can wait.
MODELS = [
    "causal/gpt2",
    "causal/llama",
    "causal/qwen2_moe",
    "causal/mixtral",
    "causal/gpt_neox",
    "masked/bert",
    "masked/deberta-v2",
    "image/deit",
    "image/dinov2",
    "swin_v2",
    "whisper",
]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_of_a_public_model_no_weight_gradient_is_left_behind_and_no_link_is_slow(pool: WorkerPool, name: str) -> None:
    findings, nothing = pool.run(findings_of, name, world_size=2, timeout=180)
    assert nothing is None
    told = [finding.text for finding in findings if finding.cause in ("weight_gradients", "slow_link")]
    assert not told


@pytest.mark.nightly
def test_a_weight_on_the_left_of_a_product_is_named(pool: WorkerPool) -> None:
    """Mamba's step sizes are ``self.dt_proj.weight @ time_step``; its A_log has the same shape."""
    findings, _ = pool.run(findings_of, "causal/mamba", world_size=2, timeout=180)
    (told,) = [finding.seen for finding in findings if finding.cause == "weight_gradients"]
    assert "layers.2.mixer.dt_proj.weight" in told and "A_log" not in told


def test_weights_that_are_not_deferred_are_named_and_no_others(pool: WorkerPool) -> None:
    findings, _ = pool.run(findings_of, "their own", world_size=2, timeout=180)
    (told,) = [finding.seen for finding in findings if finding.cause == "weight_gradients"]
    # stage 0 of zb_h1 splits no backward
    assert "of model.blocks.3.mixed, model.blocks.4.squared (stage 1) are not deferred" in told
