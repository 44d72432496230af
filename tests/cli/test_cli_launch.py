"""Who owns the output folder, how many processes a config asks for, and who starts them."""

from __future__ import annotations

import csv
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from command import TINY_RUN, run_command, run_forked, start_command
from omegaconf import OmegaConf

from lightning_pp.cli import launch
from lightning_pp.conf.schema import TorchrunConf

FAULTY = """
from pathlib import Path
from lightning.pytorch import Callback

class Once(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1 and not Path("been").exists():
            Path("been").touch()
            raise ValueError("once")
"""


def test_overrides_may_stand_on_both_sides_of_an_option() -> None:
    arguments = ["a=1", "--config-dir", "mine", "+b=[x, y]", "-m", "~c"]
    assert launch.split_overrides(arguments) == (["--config-dir", "mine", "-m"], ["a=1", "+b=[x, y]", "~c"])


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, 1),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 5),
        ({"SLURM_PROCID": "2"}, 2),
    ],
)
def test_global_rank(variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.global_rank() == rank
    assert launch.is_rank_zero() == (rank == 0)


@pytest.mark.parametrize(
    ("devices", "num_nodes", "expected"), [(2, 1, 2), ("4", 2, 8), ([0, 2], 1, 2), ("0,1,3", 1, 3), (1, 1, 1)]
)
def test_number_of_processes(devices: Any, num_nodes: int, expected: int) -> None:
    assert launch.num_processes_wanted(OmegaConf.create({"devices": devices, "num_nodes": num_nodes})) == expected


def test_cores_are_shared_unless_the_user_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch.share_cores(2)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    num_threads = torch.get_num_threads()
    try:
        launch.share_cores(4)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_torchrun_command_quotes_what_the_shell_would_eat() -> None:
    command = launch.torchrun_command(2, ["-m", "data.files=[a.txt, b.txt]"])
    assert command == "torchrun --nproc-per-node 2 -m lightning_pp -m 'data.files=[a.txt, b.txt]'"


def test_options_of_torchrun() -> None:
    launcher = OmegaConf.structured(TorchrunConf(max_restarts=3, options=["--log-dir=logs"]))
    trainer = OmegaConf.create({"devices": 4, "num_nodes": 1})
    common = ["--nproc-per-node=4", "--max-restarts=3"]
    assert launch.torchrun_options(launcher, trainer) == [*common, "--standalone", "--log-dir=logs"]
    trainer.num_nodes = 2
    with pytest.raises(ValueError, match="num_nodes=2 needs launcher.rdzv_endpoint=HOST:PORT"):
        launch.torchrun_options(launcher, trainer)
    launcher.rdzv_endpoint = "node0:29400"
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=lightning_pp"]
    assert launch.torchrun_options(launcher, trainer) == [*common, "--nnodes=2", *meeting, "--log-dir=logs"]


@pytest.mark.nightly
def test_the_command_turns_into_torchrun_which_starts_it_again(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "my.txt").write_text("It is a truth universally acknowledged. " * 400)
    arguments = [*TINY_RUN, "data.files=[my.txt]", "logger=csv", "callbacks.checkpoint.every_n_train_steps=2"]
    fault = ["launcher=torchrun", "launcher.max_restarts=1", "+callbacks.once._target_=faulty.Once"]
    ended = run_command([*arguments, *fault], tmp_path)
    assert ended.code == 0, ended.output
    assert ended.output.count("attempt 2 continues in") == 1 and "(step 2)" in ended.output, ended.output
    (run,) = tmp_path.glob("outputs/*/*")  # made by rank 0 of the first attempt alone
    assert (run / "checkpoints" / "step4.ckpt").exists() and f"continues in {run}" in ended.output, ended.output


@pytest.mark.nightly
def test_two_nodes_train_what_one_does(tmp_path: Path) -> None:
    """The command on each of two nodes, two processes each, against four processes of one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [*TINY_RUN, "data.files=[../my.txt]", "logger=csv", "schedule=1f1b", "model.num_layers=4"]
    meeting = ["launcher=torchrun", "trainer.num_nodes=2", f"launcher.rdzv_endpoint='{address}'"]
    (tmp_path / "my.txt").write_text("It is a truth universally acknowledged. " * 400)
    folders = [tmp_path / name for name in ("one", "node0", "node1")]
    for folder in folders:
        folder.mkdir()
    nodes = [start_command([*arguments, *meeting], folder) for folder in folders[1:]]
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    alone = run_forked([*arguments, "trainer.devices=4"], folders[0], num_processes=4)
    assert alone.code == 0, alone.output
    assert sum(output.count("Pipeline stages") for output in outputs) == 1, outputs
    (of_one,), of_two = folders[0].glob("outputs/**/metrics.csv"), list(tmp_path.glob("node*/outputs/**/metrics.csv"))
    assert len(of_two) == 1  # of the node that has rank 0
    assert _losses(of_two[0]) == _losses(of_one)


def _losses(metrics: Path) -> list[tuple[str, str, str]]:
    with metrics.open() as file:
        losses = [(row["step"], row["train_loss"], row["val_loss"]) for row in csv.DictReader(file)]
    assert sum(bool(train) for _, train, _ in losses) == 4 and any(val for *_, val in losses)
    return losses


def test_a_launcher_that_cannot_start_is_told_in_a_sentence(tmp_path: Path) -> None:
    ended = run_forked([*TINY_RUN, "launcher=torchrun", "trainer.num_nodes=2"], tmp_path)
    assert ended.code == 1 and "needs launcher.rdzv_endpoint=HOST:PORT" in ended.output, ended.output
    assert "Traceback" not in ended.output and not list(tmp_path.iterdir()), ended.output
