"""What a diagnosis says of links is true: nothing of public models."""

from __future__ import annotations

import pytest
from diagnosed_models import findings_of
from pool import WorkerPool

#: Products of all kinds, norms, routers and convolutions.
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
def test_of_a_public_model_no_link_is_slow(pool: WorkerPool, name: str) -> None:
    findings, nothing = pool.run(findings_of, name, world_size=2, timeout=180)
    assert nothing is None
    told = [finding.text for finding in findings if finding.cause == "slow_link"]
    assert not told
