"""A run goes on from its folder: with its own configuration, newest checkpoint and logs; what cannot is told."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest
import torch
from command import TINY_RUN, run_forked
from pool import torchrun_environ
from torch.distributed import TCPStore

from lightning_pp.checkpoint.reading.open import read_alone
from lightning_pp.cli.problems import UserError
from lightning_pp.cli.resume import remember_folder, with_what_it_resumes

TEXT = ["data.files=[my.txt]", "strategy.schedule=1f1b", "hydra.run.dir=run"]


def with_text(folder: Path) -> Path:
    (folder / "my.txt").write_text("It is a truth universally acknowledged. " * 400)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_text(tmp_path)


def losses(run: Path) -> list[float]:
    """In their order; the steps that Lightning logs after a checkpoint of a validation are one less than otherwise."""
    (file,) = run.glob("csv/*/metrics.csv")
    with file.open() as stream:
        return [float(row["train_loss"]) for row in csv.DictReader(stream) if row["train_loss"]]


def check_equal(one: Path, other: Path) -> None:
    one_state, other_state = (read_alone(path)["state_dict"] for path in (one, other))
    assert one_state.keys() == other_state.keys()
    for name, value in one_state.items():
        assert torch.equal(value, other_state[name]), name


OPTIONS = [*TINY_RUN, "data.files=[my.txt]", "logger=csv", "strategy.schedule=1f1b", "model.dropout=0.1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run``, of two processes and four steps, and ``copied``, the same as it was then."""
    folder = with_text(tmp_path_factory.mktemp("trained"))
    first = run_forked([*OPTIONS, "hydra.run.dir=run", "resume=auto"], folder, 2)  # nothing there yet
    assert first.code == 0, first.output
    shutil.copytree(folder / "run", folder / "copied")
    return folder


def test_a_run_goes_on_as_one_that_was_not_interrupted(trained: Path) -> None:
    """From another working folder, with what has changed on top; weights and logs are those of one run, bit for bit."""
    folder = trained
    (folder / "elsewhere").mkdir()
    resumed = run_forked(["trainer.max_steps=8", "resume=../run"], folder / "elsewhere", 2)
    assert resumed.code == 0, resumed.output
    told = f"the run continues in {folder}/run from {folder}/run/checkpoints/step4.ckpt (step 4)"
    assert resumed.output.count(told) == 1, resumed.output
    assert "is not empty" not in resumed.output, resumed.output
    branched = run_forked([*OPTIONS, "ckpt_path=run/checkpoints/step4.ckpt", "trainer.max_steps=5"], folder, 2)
    assert branched.code == 0 and branched.output.count("The dirpath has changed") == 1, branched.output
    whole = run_forked([*OPTIONS, "hydra.run.dir=whole", "trainer.max_steps=8"], folder, 2)
    assert whole.code == 0, whole.output
    check_equal(folder / "run/checkpoints/step8.ckpt", folder / "whole/checkpoints/step8.ckpt")
    assert losses(folder / "run") == losses(folder / "whole")
    # what was changed stays
    again = run_forked(["resume=auto", "hydra.run.dir=run"], folder, 2)
    assert again.code == 0 and "all 8 steps of trainer.max_steps=8 are done" in again.output, again.output
    assert len(list(folder.glob("run/checkpoints/*"))) == 2


@pytest.mark.nightly
def test_a_damaged_checkpoint_is_passed_over(folder: Path) -> None:
    first = run_forked(
        [
            *TINY_RUN,
            *TEXT,
            "logger=none",
            "callbacks.checkpoint.every_n_train_steps=2",
            "callbacks.checkpoint.save_top_k=-1",
        ],
        folder,
        2,
    )
    assert first.code == 0, first.output
    last = folder / "run/checkpoints/step4.ckpt"
    assert last.exists() and (folder / "run/checkpoints/step2.ckpt").exists()
    shard = max(last.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = run_forked(["resume=run"], folder, 2)
    assert resumed.code == 0, resumed.output
    assert "/run/checkpoints/step2.ckpt (step 2)" in resumed.output and "checksum" in resumed.output, resumed.output


@pytest.mark.nightly
def test_the_configuration_is_that_of_the_run_where_files_have_changed(folder: Path) -> None:
    recipe = folder / "conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    text = "# @package _global_\nmodel:\n  dim: {}\ndata:\n  files: [my.txt]\n"
    recipe.write_text(text.format(16))
    options = [each for each in TINY_RUN if not each.startswith("model.dim")]
    first = run_forked(["--config-dir", "conf", "recipe=mine", *options, *TEXT[1:], "logger=wandb"], folder, 2)
    assert first.code == 0, first.output
    assert "Tip:" not in first.output, first.output
    recipe.write_text(text.format(32))
    resumed = run_forked(["resume=run", "trainer.max_steps=6"], folder, 2)
    assert resumed.code == 0, resumed.output
    assert re.search(r"^  dim: 16$", (folder / "run/.hydra/config.yaml").read_text(), re.MULTILINE)
    runs = {path.name.rpartition("-")[2] for path in folder.glob("run/wandb/offline-run-*")}
    assert len(runs) == 1
    # an option that is not there is told as always
    refused = run_forked(["resume=run", "trainer.max_stps=6"], folder)
    assert refused.code == 1 and "trainer.max_steps" in refused.output, refused.output


def test_what_cannot_go_on_is_told_in_a_sentence(folder: Path, trained: Path) -> None:
    (folder / "empty").mkdir()
    for given, told in (
        (["resume=missing"], "resume=missing is not a folder"),
        (["resume=empty"], "resume=empty is not the output folder of a run"),
        (["resume=empty", "--multirun"], "resume= continues one run, not a sweep"),
    ):
        ended = run_forked(given, folder)
        assert ended.code == 1 and told in ended.output and "Traceback" not in ended.output, ended.output
    shutil.copytree(trained / "copied", folder / "run")
    ended = run_forked(["resume=run"], folder)
    assert ended.code == 0 and "all 4 steps of trainer.max_steps=4 are done" in ended.output, ended.output
    ended = run_forked(["resume=run", "mode=test"], folder)
    assert ended.code == 1 and "mode=test is not one" in ended.output, ended.output
    (folder / "run/checkpoints/step4.ckpt/.metadata").rename(folder / "metadata")
    ended = run_forked(["resume=run"], folder)
    assert ended.code == 1 and "has saved no checkpoint" in ended.output, ended.output
    (folder / "metadata").rename(folder / "run/checkpoints/step4.ckpt/.metadata")
    broken = next((folder / "run/checkpoints/step4.ckpt").glob("*.distcp"))
    broken.write_bytes(broken.read_bytes()[:100])
    ended = run_forked(["resume=run"], folder)
    assert ended.code == 1 and "is truncated" in ended.output and "Traceback" not in ended.output, ended.output
    shutil.rmtree(folder / "run/checkpoints")
    hydra = folder / "run/.hydra/hydra.yaml"
    hydra.write_text(hydra.read_text().replace("lightning_pp.conf", "theirs.conf"))
    ended = run_forked(["resume=run"], folder)
    assert ended.code == 1 and "is a run of another program" in ended.output, ended.output


def test_attempts_are_those_of_one_command_in_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script under torchrun may run one command after the other; torchrun's own count is of one node's failures."""
    first = run_forked([*TINY_RUN, *TEXT, "logger=none", "trainer.devices=1"], folder)
    assert first.code == 0, first.output
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in torchrun_environ(0, 1, store.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    command, other = [*TINY_RUN, *TEXT, "logger=none"], ["mode=test"]
    assert with_what_it_resumes(command) == command
    remember_folder("run")
    assert with_what_it_resumes(other) == other
    again = with_what_it_resumes(command)
    assert f"ckpt_path='{folder}/run/checkpoints/step4.ckpt'" in again and f"resume='{folder}/run'" in again


def test_several_nodes_without_a_store_have_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = torchrun_environ(0, 4, 1) | {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="cannot reach the store of its rendezvous. Give a folder that all nodes see, hydra.run"
    ):
        with_what_it_resumes(TINY_RUN)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert with_what_it_resumes(TINY_RUN) == TINY_RUN
