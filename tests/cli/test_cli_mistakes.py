"""What a user can get wrong on the command line: one clear message, a non-zero exit code, nothing launched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command import TINY_RUN, run_forked

from lightning_pp.cli import main


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.devicez=3", "trainer.devicez=3: trainer has no devicez. Closest names: trainer.devices"),
        ("max_steps=4", "max_steps=4: the config has no max_steps. Closest names: trainer.max_steps"),
        ("modle=byte_gpt", "modle=byte_gpt: the config has no modle. Closest names: mode, model"),
        (
            "data.zzz=1",
            "data.zzz=1: data has no zzz. Names in data: _target_, files, batch_size, seq_len, num_train_crops, "
            "num_val_crops, val_fraction, max_bytes, seed, num_workers. To give its class another argument, write "
            "+data.zzz=1",
        ),
        (
            "recipe=byte_gpd",
            "recipe=byte_gpd: recipe is one of byte_gpt, causal_lm, gpt2_124m, llama, llama_70b, llama_8b, lora, moe, "
            "own, t5, two_tower, vit. The closest is byte_gpt",
        ),
        (
            "recipe=gpt3",
            "recipe=gpt3: recipe is one of byte_gpt, causal_lm, gpt2_124m, llama, llama_70b, llama_8b, lora, moe, "
            "own, t5, two_tower, vit. The closest is gpt2_124m",
        ),
        ("logger=wandbb", "logger=wandbb: logger is one of csv, none, wandb. The closest is wandb"),
        ("+recipe=llama", "+recipe=llama: recipe is already chosen. To choose another, write recipe=llama"),
        ("llama", "llama is not an override. Write NAME=VALUE"),
        ("trainer=1", "trainer=1: trainer is a group. Choose one of its options with trainer=NAME"),
        ("data.files=x.txt", "data.files=x.txt: data.files is a list. Write data.files='[x.txt]'"),
        ("data.files=[a", "data.files=[a cannot be read. Write a list as [a, b]"),
        ("trainer.max_steps=many", "trainer.max_steps=many: Value 'many' of type 'str' could not be converted"),
    ],
)
def test_override_that_does_not_fit_is_refused_in_a_sentence(
    override: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lightning-pp", override])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    output = "".join(capfd.readouterr()).strip()
    assert output.startswith(f"lightning-pp: {said}")
    assert len(output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


WITHOUT_PIPELINE = [*(option for option in TINY_RUN if "strategy" not in option), "trainer.devices=1", "strategy=auto"]
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "data files": (
        ["data.files=[nope.txt, folder, '*.md']"],
        ["nope.txt: does not exist", "folder: is a folder", "*.md: no file matches"],
    ),
    "checkpoint": (["mode=test", "ckpt_path=nope.ckpt"], ["ckpt_path=nope.ckpt does not exist"]),
    "argument of another class": (
        ["data._target_=lightning_pp.recipes.images.ImageDataModule"],
        ["got an unexpected keyword argument 'files'. Arguments of the class that _target_", "data=own"],
    ),
    "schedule": (["strategy.schedule=zb_h9"], ["zb_h9", "zb_h1"]),
    "no GPU": (["recipe=gpt2_124m"], ["trainer.accelerator=gpu needs a GPU", "trainer=cpu trainer.devices=NUMBER"]),
    "logger": (
        [*WITHOUT_PIPELINE, "logger=csv", "logger.save_dir=/dev/null/logs", "callbacks=none"],
        ["CSVLogger cannot be used: NotADirectoryError", "Run without one: logger=none"],
    ),
    "several runs": (
        ["-m", "data.seed=1,2", "strategy.schedule=1f1b"],
        ["torchrun --nproc-per-node 2 -m lightning_pp -m data.seed=1,2 strategy.schedule=1f1b"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_anything_is_launched(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "folder").mkdir()
    arguments, said = MISTAKES[mistake]
    finished = run_forked(arguments, tmp_path)
    assert finished.code == 1
    assert all(part in finished.output for part in said), finished.output
    assert "Traceback" not in finished.output
    assert "MEMBER" not in finished.output  # Lightning's line about a launched process
    if mistake in ("data files", "checkpoint"):  # what was refused leaves no folder
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_was_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine" / ".hydra").mkdir(parents=True)
    finished = run_forked(["mode=test", "ckpt_path=nope.ckpt", "hydra.run.dir=mine"], tmp_path)
    assert finished.code == 1
    assert (tmp_path / "mine" / ".hydra").is_dir()


def test_more_stages_than_units_are_told_before_anything_is_launched(tmp_path: Path) -> None:
    options = ["strategy.stages_per_rank=2", "strategy.schedule=interleaved_1f1b", "trainer.devices=8"]
    finished = run_forked([*TINY_RUN, "strategy.num_microbatches=8", "data.batch_size=8", *options], tmp_path)
    assert finished.code == 1
    assert "16 stages need at least 16 units, but the step calls " in finished.output
    assert finished.output.count("lightning-pp: ") == 1
    assert "Traceback" not in finished.output and "MEMBER" not in finished.output
    assert not list(tmp_path.rglob("wandb"))


def test_mistake_found_after_the_launch_ends_every_process_with_one_message(tmp_path: Path) -> None:
    finished = run_forked([*TINY_RUN, "strategy.pipeline_parallel_size=3", "logger=none"], tmp_path)
    assert finished.code != 0
    assert finished.output.count("lightning-pp: ") == 1
    assert "Traceback" not in finished.output


def test_under_torchrun_a_mistake_is_told_once(tmp_path: Path) -> None:
    finished = run_forked(["trainer.devicez=3"], tmp_path, num_processes=2)
    assert finished.code == 1
    assert finished.output.count("Closest names: trainer.devices") == 1
    assert list(tmp_path.iterdir()) == []


def test_more_processes_than_devices_are_told_once_with_both_numbers(tmp_path: Path) -> None:
    finished = run_forked([*TINY_RUN, "trainer.devices=1", "logger=none"], tmp_path, num_processes=2)
    assert finished.code == 1
    assert finished.output.count("2 processes were started on this node") == 1
    assert "has devices for 1. Set devices=2, or start 1" in finished.output
    assert "IndexError" not in finished.output
