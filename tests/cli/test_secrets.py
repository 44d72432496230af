"""No secret of a config is in what a run saves or logs of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from command import TINY_RUN, run_command, run_forked
from omegaconf import OmegaConf

from lightning_pp.conf.secrets import hide, is_secret, without_secrets

SECRET = "s3cr3t-of-the-test"

MODULE = """
from lightning_pp.recipes.byte_gpt import ByteGPT

class Mine(ByteGPT):
    def __init__(self, hub_token=None, from_environment=None, **others):
        super().__init__(**others)
        self.save_hyperparameters({"hub_token": hub_token, "width": 16})
"""


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("api_key", "WANDB_API_KEY", "apikey", "hub_token", "token", "password")),
        *((name, True) for name in ("db_password", "secret", "client_secret", "aws_secret_access_key")),
        *((name, False) for name in ("key", "sort_key", "pad_token", "tokenizer", "num_key_value_heads", "max_tokens")),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_logged_config_is_resolved_but_for_secrets_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("MY_FOLDER", "/data")
    config = OmegaConf.create(
        {
            "model": {
                "hub_token": "abcdef",
                "where": "https://me:abcdef@host",
                "depth": "${depth}",
                "pad_token": "<p>",
            },
            "depth": 3,
            "from_environment": "${oc.env:MY_TOKEN}",
            "by_way": "token ${from_environment}",
            "folder": "${oc.env:MY_FOLDER}/runs",
        }
    )
    assert without_secrets(config) == {
        "model": {"hub_token": "***", "where": "https://me:***@host", "depth": 3, "pad_token": "<p>"},
        "depth": 3,
        "from_environment": "${oc.env:MY_TOKEN}",
        "by_way": "token ***",
        "folder": "${oc.env:MY_FOLDER}/runs",
    }


def test_overrides_are_hidden_and_their_form_kept() -> None:
    given = ["+logger.api_key=abcdefgh", "++model.hub_token='a b c d'", "trainer.max_steps=3", "x=1,abcdefgh"]
    assert hide(given) == ["+logger.api_key=***", "++model.hub_token=***", "trainer.max_steps=3", "x=1,***"]
    assert hide(["model.token=${oc.env:TOKEN}"]) == ["model.token=${oc.env:TOKEN}"]


def wait_for_command_line(folder: Path) -> None:
    """W&B's service may write its file, with the command line, after the run has ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if any(b"model.hub_token=" in path.read_bytes() for path in folder.rglob("*.wandb")):
            return
        time.sleep(0.2)
    raise AssertionError("W&B has not kept the command line")


@pytest.mark.parametrize("logger", ["csv", "wandb"])
def test_no_file_of_a_run_holds_a_secret(logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", f"{SECRET}-2")
    (tmp_path / "mine.py").write_text(MODULE)
    overrides = [f"+model.hub_token={SECRET}", "+model.from_environment=${oc.env:TOKEN_OF_TEST}"]
    one_process = ["trainer.devices=1", "strategy=auto", f"logger={logger}", "callbacks=none", "trainer.max_steps=1"]
    arguments = [*[a for a in TINY_RUN if "strategy" not in a], "++model._target_=mine.Mine", *overrides, *one_process]
    (tmp_path / "run").mkdir()
    run = run_command if logger == "wandb" else run_forked  # W&B writes the rest where a process ends as usual
    finished = run([*arguments, "hydra.run.dir=run", "trainer.enable_checkpointing=false"], tmp_path, timeout_s=200)
    assert finished.code == 0, finished.output
    if logger == "wandb":
        wait_for_command_line(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"config.yaml", "overrides.yaml", "hydra.yaml"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    saved = OmegaConf.load(tmp_path / "run" / ".hydra" / "config.yaml")
    assert saved.model.hub_token == "***" and saved.model.dim == 16
    assert "${oc.env:TOKEN_OF_TEST}" in (tmp_path / "run" / ".hydra" / "config.yaml").read_text()
