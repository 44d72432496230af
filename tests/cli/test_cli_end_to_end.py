"""The command line from start to report, launched by itself and by torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import TINY_RUN, Finished, run_command, torchrun


def reported_path(finished: Finished, name: str) -> Path:
    match = re.search(rf"^{re.escape(name)}\s+(\S+)$", finished.output, flags=re.MULTILINE)
    assert match, finished.output
    return Path(match.group(1))


@pytest.fixture(scope="module")
def own_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "my.txt").write_text("It is a truth universally acknowledged. " * 100)
    (folder / "more").mkdir()
    (folder / "more" / "notes.md").write_text("# Notes\n" * 200)
    return folder


def test_default_run_reports_stages_loss_and_paths_and_its_checkpoint_can_be_tested(own_text: Path) -> None:
    finished = run_command([*TINY_RUN, "data.files=[my.txt, more/*.md]"], own_text)
    assert finished.code == 0, finished.output
    for heading in ("stage", "units", "parameters", "F ms", "I ms", "W ms", "bubble", "wait ms", "peak GiB"):
        assert heading in finished.output
    assert re.search(r"^loss\s+5\.\d+ at the start, [345]\.\d+ at the end$", finished.output, flags=re.MULTILINE)
    assert re.search(r"^tokens per second\s+[\d,]+ \(\d+ ms a step\)$", finished.output, flags=re.MULTILINE)
    checkpoint = reported_path(finished, "checkpoint")
    assert checkpoint.exists()
    wandb_run = reported_path(finished, "W&B run")
    assert list(wandb_run.glob("*.wandb"))

    # one output folder, with one log file: the second process wrote neither
    folders = list(own_text.glob("outputs/*/*"))
    assert len(folders) == 1
    assert [path.name for path in folders[0].glob("*.log")] == ["lightning_pp.log"]
    assert len(list(own_text.rglob("config.yaml"))) == 1 + len(list(wandb_run.rglob("config.yaml")))

    tested = run_command(
        [*TINY_RUN, "data.files=[my.txt]", "mode=test", f"ckpt_path='{checkpoint}'", "logger=none"], own_text
    )
    assert tested.code == 0, tested.output
    assert re.search(r"^test_loss\s+[345]\.\d+$", tested.output, flags=re.MULTILINE)


def test_torchrun_gives_one_output_folder_and_one_report(own_text: Path) -> None:
    folder = own_text / "torchrun"
    folder.mkdir()
    finished = run_command(
        [*TINY_RUN, "data.files=[../my.txt]", "logger=csv", "strategy.schedule=1f1b"], folder, launcher=torchrun(2)
    )
    assert finished.code == 0, finished.output
    assert finished.output.count("Pipeline stages") == 1
    assert reported_path(finished, "checkpoint").exists()
    assert [path.name for path in folder.iterdir()] == ["outputs"]
    assert len(list(folder.glob("outputs/*/*"))) == 1


def test_multirun_under_torchrun_runs_every_job(own_text: Path) -> None:
    folder = own_text / "sweep"
    folder.mkdir()
    finished = run_command(
        [*TINY_RUN, "--multirun", "data.files=[../my.txt]", "logger=none", "data.seed=1,2", "trainer.max_steps=2"],
        folder,
        launcher=torchrun(2),
    )
    assert finished.code == 0, finished.output
    assert finished.output.count("Pipeline stages") == 2
    assert [path.name for path in folder.iterdir()] == ["multirun"]
    assert sorted(path.name for path in folder.glob("multirun/*/*/*") if path.is_dir()) == ["0", "1"]
