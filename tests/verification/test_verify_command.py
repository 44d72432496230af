"""``lightning-pp-verify``: what it prints of a configuration, and its exit code."""

from __future__ import annotations

from pathlib import Path

import verified_modules
from command import Finished, run_forked

OWN = ["data=own", "data._target_=verified_modules.Data", "strategy.num_microbatches=4", "steps=3"]


def verified(folder: Path, *arguments: str) -> Finished:
    (folder / "verified_modules.py").write_text(Path(verified_modules.__file__).read_text())
    return run_forked([*arguments], folder, module="lightning_pp.cli.verify", timeout_s=200)


def test_a_difference_ends_with_1(tmp_path: Path) -> None:
    finished = verified(
        tmp_path, "recipe=own", "model._target_=verified_modules.ReadsWorldSize", *OWN, "strategy.data_parallel_size=2"
    )
    assert finished.code == 1, finished.output
    assert "note: data_parallel_size=1, not 2: one pipeline is compared" in finished.output
    assert "DIFFERENT, first in training, batch_idx=2: loss loss: " in finished.output


def test_a_refusal_ends_with_1(tmp_path: Path) -> None:
    finished = verified(tmp_path, "recipe=own", "model._target_=verified_modules.Contrastive", *OWN)
    assert finished.code == 1, finished.output
    assert "NOT COMPARED: the pipeline ends with SplitError: The loss of training_step" in finished.output


def test_without_a_pipeline_there_is_nothing_to_compare(tmp_path: Path) -> None:
    finished = verified(tmp_path, "strategy=auto")
    assert finished.code == 1
    assert (
        "lightning-pp-verify: strategy=lightning_pp.conf.builders.lightning_strategy is not a pipeline"
        in finished.output
    )
