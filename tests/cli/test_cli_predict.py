"""``mode=predict``: of which weights, and where the predictions are."""

from __future__ import annotations

from pathlib import Path

import torch
from command import TINY_RUN, run_forked

from lightning_pp.callbacks import read_predictions
from lightning_pp.recipes.byte_gpt import ByteGPT


def test_predictions_are_written_and_weights_are_named(tmp_path: Path) -> None:
    """They are those of the checkpoint's weights on one device, in the order of the samples."""
    (tmp_path / "my.txt").write_bytes(bytes(range(32, 127)) * 100)
    run = [*TINY_RUN, "data.files=[my.txt]", "logger=none", "trainer.accelerator=cpu"]
    refused = run_forked([*run, "mode=predict"], tmp_path)
    assert refused.code == 1 and "mode=predict needs a checkpoint" in refused.output, refused.output
    assert "ckpt_path=initial" in refused.output and not list(tmp_path.rglob("predictions"))

    torch.manual_seed(0)
    model = ByteGPT(num_layers=2, dim=16, num_heads=2, max_seq_len=32)
    torch.save({"state_dict": model.state_dict(), "pytorch-lightning_version": "2.6.6"}, tmp_path / "a.ckpt")
    arguments = [*run, "mode=predict", "ckpt_path=a.ckpt", "data.batch_size=2", "hydra.run.dir=out"]
    done = run_forked(arguments, tmp_path, num_processes=2)
    assert done.code == 0 and "predictions" in done.output, done.output
    batches = read_predictions(tmp_path / "out" / "predictions")
    assert [batch["indices"] for batch in batches] == [[0, 1], [2, 3]]
    assert {path.name for path in (tmp_path / "out" / "predictions" / "loader0").iterdir()} == {"rank0"}

    text = torch.tensor(list((tmp_path / "my.txt").read_bytes() + b"\n"))
    val = text[len(text) - int(len(text) * 0.05) :]
    crops = torch.stack([val[o : o + 32] for o in torch.linspace(0, len(val) - 32, 4).long()])
    with torch.no_grad():
        assert torch.equal(torch.cat([batch["predictions"] for batch in batches]), model(crops).argmax(-1))

    again = run_forked(arguments, tmp_path, num_processes=2)
    assert again.code == 1 and "holds predictions already" in again.output, again.output
