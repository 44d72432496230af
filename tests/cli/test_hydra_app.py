"""What a Hydra application of the user's own gets, and what commands answer without a run."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as L
import pytest
from command import TINY_RUN, run_command, run_forked

import lightning_pp
from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError

APPLICATION = """
import lightning as L
from lightning_pp.cli import hydra_main
from lightning_pp.conf import build

@hydra_main(config_path="conf", config_name="mine")
def main(config):
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_steps=2, strategy=build(config.strategy), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(build(config.model), build(config.data))
    print(f"rank {trainer.global_rank} of {config.name} has trained {trainer.global_step} steps")

if __name__ == "__main__":
    main()
"""
CONFIG = """
defaults:
  - strategy: pipeline
  - model: byte_gpt
  - data: byte_text
  - _self_
name: mine
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text(APPLICATION)
    return tmp_path


@pytest.mark.parametrize("launches_itself", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_application_uses_the_groups_and_leaves_one_folder(application: Path, launches_itself: bool) -> None:
    overrides = [*(each for each in TINY_RUN if not each.startswith("trainer.")), "strategy.schedule=1f1b"]
    if launches_itself:
        finished = run_command(overrides, application, module="train")
    else:
        finished = run_forked(overrides, application, num_processes=2, module="train")
    assert finished.code == 0, finished.output
    assert {f"rank {rank} of mine has trained 2 steps" for rank in (0, 1)} <= set(finished.output.splitlines())
    files = {path.name for path in application.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files == {"train.py", "mine.yaml", "train.log", "config.yaml", "hydra.yaml", "overrides.yaml"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("strategy.schedul=1f1b", "strategy has no schedul. Closest names: strategy.schedule"),
        (
            "schedule=v_half",
            "the defaults of the config choose no schedule, so there is none to replace. Add one by +schedule=v_half",
        ),
    ],
)
def test_an_application_refuses_in_a_sentence(application: Path, override: str, said: str) -> None:
    finished = run_forked([override], application, module="train")
    assert (finished.code, finished.output.strip()) == (1, f"train.py: {override}: {said}")
    assert not (application / "outputs").exists()


def test_processes_that_cannot_be_started_are_refused_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigurationError, match=r"2 processes cannot be started from a notebook.*devices=1"):
        L.Trainer(accelerator="cpu", devices=2, strategy=PipelineParallelStrategy(), logger=False)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=PipelineParallelStrategy(), logger=False)
    assert trainer.num_devices == 1


COMMANDS = {
    "lightning-pp": "lightning_pp",
    "lightning-pp-plan": "lightning_pp.cli.plan.command",
    "lightning-pp-verify": "lightning_pp.cli.verify",
    "lightning-pp-export": "lightning_pp.cli.export.command",
    "lightning-pp-report": "lightning_pp.cli.past_runs.command",
    "lightning-pp-data": "lightning_pp.cli.data.command",
    "lightning-pp-doctor": "lightning_pp.doctor",
}


def test_every_command_is_asked_for_its_version() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    scripts = pyproject.partition("[project.scripts]\n")[2].partition("\n[")[0]
    assert set(re.findall(r"^(\S+) = ", scripts, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_version_is_that_of_this_package(command: str, tmp_path: Path) -> None:
    finished = run_forked(["--version"], tmp_path, module=COMMANDS[command])
    assert finished.code == 0
    told = f"{command} {lightning_pp.__version__} (torch {version('torch')}, lightning "
    # runpy may warn besides of a module that its package has imported
    assert [line for line in finished.output.splitlines() if line.startswith(told)], finished.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("strategy.sched", {"strategy.schedule="}),
        ("recipe=gpt", {"recipe=gpt2_124m"}),
        ("logger=w", {"logger=wandb"}),
        ("trainer.max_e", {"trainer.max_epochs="}),
    ],
)
def test_hydra_completes_groups_options_and_names(
    word: str, offered: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", f"lightning-pp {word}")
    monkeypatch.setenv("COMP_POINT", str(len(f"lightning-pp {word}")))
    finished = run_forked(["--shell-completion", "query=bash"], tmp_path)
    assert finished.code == 0
    assert offered <= set(finished.output.split())
    assert list(tmp_path.iterdir()) == []
