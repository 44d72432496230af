"""What a Hydra application of the user's own gets, and what commands answer without a run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as L
import pytest
from command import TINY_RUN, run_command, run_forked

import lightning_pp
from lightning_pp import PipelineParallelStrategy
from lightning_pp.cli.hydra_app.completion import completion_script
from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import available_schedules

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


@pytest.mark.parametrize("command", COMMANDS)
def test_version_is_that_of_this_package(command: str, tmp_path: Path) -> None:
    finished = run_forked(["--version"], tmp_path, module=COMMANDS[command])
    assert finished.code == 0
    told = f"{command} {lightning_pp.__version__} (torch {version('torch')}, lightning "
    # runpy may warn besides of a module that its package has imported
    assert [line for line in finished.output.splitlines() if line.startswith(told)], finished.output
    assert list(tmp_path.iterdir()) == []


def complete(script: Path, word: str, folder: Path) -> set[str]:
    """What bash offers for ``word`` behind the command; it breaks words at ``=``, as an interactive bash does."""
    finished = subprocess.run(
        [
            *("bash", "--norc", "-c"),
            f'source {script}; COMP_LINE="lightning-pp {word}"; COMP_POINT=${{#COMP_LINE}}; '
            'COMP_WORDBREAKS=" ="; _lightning_pp; printf "%s\\n" "${COMPREPLY[@]}"',
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stderr == ""
    return set(finished.stdout.split())


def test_completion_of_names_and_values(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(completion_script("lightning-pp", "config"))
    (tmp_path / "corpus.txt").touch()
    assert complete(script, "strategy.sched", tmp_path) == {"strategy.schedule="}
    assert complete(script, "strategy.schedule=", tmp_path) == {*available_schedules(), "auto"}
    assert {"byte_gpt", "gpt2_124m", "llama"} <= complete(script, "recipe=", tmp_path)
    assert complete(script, "logger=", tmp_path) >= {"csv", "none", "wandb"}
    assert not {each for each in complete(script, "model=", tmp_path) if each.endswith("_schema")}
    assert complete(script, "strategy.shard", tmp_path) == {"strategy.sharding="}
    assert complete(script, "strategy.sharding=", tmp_path) == {"replicate", "shard_grad_op", "full_shard"}
    assert complete(script, "mod", tmp_path) == {"mode=", "model=", "model."}
    assert complete(script, "mode=", tmp_path) == {"fit", "validate", "test", "predict"}
    assert complete(script, "trainer.detect_anomaly=t", tmp_path) == {"true"}
    assert complete(script, "ckpt_path=cor", tmp_path) == {"corpus.txt"}
    assert complete(script, "--vers", tmp_path) == {"--version"}
    assert "strategy." in complete(script, "", tmp_path) and "strategy.schedule=" not in complete(script, "", tmp_path)
