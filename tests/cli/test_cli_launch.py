"""Who owns the output folder, and how many processes a config asks for."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_pp.cli import launch


def test_rank_zero_keeps_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch.arguments_of_this_rank(["recipe=llama"]) == ["recipe=llama"]
    assert launch.launched_from_outside()


def test_other_ranks_make_no_output_folder_and_no_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    arguments = launch.arguments_of_this_rank(["recipe=llama"])
    assert arguments[0] == "recipe=llama"
    assert {"hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"} <= set(arguments)


def test_overrides_may_stand_on_both_sides_of_an_option() -> None:
    arguments = ["a=1", "--config-dir", "mine", "+b=[x, y]", "-m", "~c"]
    assert launch.overrides_last(arguments) == ["--config-dir", "mine", "-m", "a=1", "+b=[x, y]", "~c"]


def test_child_of_lightning_keeps_the_folder_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    arguments = launch.arguments_of_this_rank(['hydra.run.dir="outputs/a"', "hydra.job.name=train_ddp_process_1"])
    assert 'hydra.run.dir="outputs/a"' in arguments
    assert "hydra.run.dir=." not in arguments
    assert "hydra/job_logging=none" in arguments


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
