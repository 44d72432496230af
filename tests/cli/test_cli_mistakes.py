"""What a user can get wrong on the command line: one clear message, a non-zero exit code, nothing launched."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import TINY_RUN, run_command, run_forked


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.devicez=3", "trainer.devicez=3: trainer has no devicez. Closest names: trainer.devices"),
        ("max_steps=4", "max_steps=4: the config has no max_steps. Closest names: trainer.max_steps"),
        ("modle=byte_gpt", "modle=byte_gpt: the config has no modle. Closest names: mode, model"),
        ("data.zzz=1", "data.zzz=1: data has no zzz. Names in data: _target_, files, batch_size"),
        (
            "recipe=byte_gpd",
            "recipe=byte_gpd: recipe is one of byte_gpt, causal_lm, gpt2_124m, llama, llama_70b, llama_8b, lora, moe, "
            "own, t5, vit. The closest is byte_gpt",
        ),
        (
            "recipe=gpt3",
            "recipe=gpt3: recipe is one of byte_gpt, causal_lm, gpt2_124m, llama, llama_70b, llama_8b, lora, moe, "
            "own, t5, vit. The closest is gpt2_124m",
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
def test_override_that_does_not_fit_is_refused_in_a_sentence(override: str, said: str, tmp_path: Path) -> None:
    finished = run_forked([override], tmp_path)
    assert finished.code == 1
    assert finished.output.strip().startswith(f"lightning-pp: {said}")
    assert len(finished.output.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_unreadable_data_file_is_named_before_anything_is_launched(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    finished = run_forked(["data.files=[nope.txt, folder, '*.md']"], tmp_path)
    assert finished.code == 1
    assert "nope.txt: does not exist" in finished.output
    assert "folder: is a folder" in finished.output
    assert "*.md: no file matches" in finished.output
    assert "Traceback" not in finished.output
    assert "MEMBER" not in finished.output  # Lightning's line about a launched process
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # what was refused leaves no folder


def test_missing_checkpoint_is_named_before_anything_is_launched(tmp_path: Path) -> None:
    finished = run_forked(["mode=test", "ckpt_path=nope.ckpt"], tmp_path)
    assert finished.code == 1
    assert "ckpt_path=nope.ckpt does not exist" in finished.output
    assert "Traceback" not in finished.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine" / ".hydra").mkdir(parents=True)
    finished = run_forked(["mode=test", "ckpt_path=nope.ckpt", "hydra.run.dir=mine"], tmp_path)
    assert finished.code == 1
    assert (tmp_path / "mine" / ".hydra").is_dir()


def test_bad_option_of_strategy_or_model_is_one_message(tmp_path: Path) -> None:
    finished = run_forked(["strategy.schedule=zb_h9"], tmp_path)
    assert finished.code == 1
    assert "zb_h9" in finished.output
    assert "zb_h1" in finished.output  # the list of those there are
    assert "Traceback" not in finished.output


def test_more_stages_than_units_are_told_before_anything_is_launched(tmp_path: Path) -> None:
    options = ["strategy.stages_per_rank=2", "strategy.schedule=interleaved_1f1b", "trainer.devices=8"]
    finished = run_forked([*TINY_RUN, "strategy.num_microbatches=8", "data.batch_size=8", *options], tmp_path)
    assert finished.code == 1
    assert "16 stages need at least 16 units, but the step calls " in finished.output
    assert finished.output.count("lightning-pp: ") == 1
    assert "Traceback" not in finished.output and "MEMBER" not in finished.output
    assert not list(tmp_path.rglob("wandb"))


def test_mistake_found_after_the_launch_ends_every_process_with_one_message(tmp_path: Path) -> None:
    finished = run_command([*TINY_RUN, "strategy.pipeline_parallel_size=3", "logger=none"], tmp_path)
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


def test_recipe_for_gpus_says_what_to_do_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finished = run_forked(["recipe=gpt2_124m"], tmp_path)
    assert finished.code == 1
    assert "trainer.accelerator=gpu needs a GPU" in finished.output
    assert "trainer=cpu trainer.devices=NUMBER" in finished.output
    assert "Traceback" not in finished.output


def test_logger_that_cannot_be_used_is_told_in_a_sentence(tmp_path: Path) -> None:
    options = ["trainer.devices=1", "strategy=auto", "logger=csv", "logger.save_dir=/dev/null/logs", "callbacks=none"]
    finished = run_forked([*(option for option in TINY_RUN if "strategy" not in option), *options], tmp_path)
    assert finished.code == 1
    assert "CSVLogger cannot be used: NotADirectoryError" in finished.output
    assert "Run without one: logger=none" in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize("flag", ["-m", pytest.param("--multirun", marks=pytest.mark.nightly)])
def test_self_launched_multirun_is_refused_with_the_torchrun_command(flag: str, tmp_path: Path) -> None:
    finished = run_forked([flag, "data.seed=1,2", "strategy.schedule=1f1b"], tmp_path)
    assert finished.code == 1
    assert f"torchrun --nproc-per-node 2 -m lightning_pp {flag} data.seed=1,2 strategy.schedule=1f1b" in finished.output
    assert "Traceback" not in finished.output
