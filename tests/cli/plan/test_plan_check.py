"""``lightning-pp-plan --check``: what can be cut, what cannot, and what is missing to say so."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from command import run_forked
from rich.console import Console
from torch import nn

from lightning_pp.cli.plan.check import run_check
from lightning_pp.cli.plan.command import check_class, main
from lightning_pp.split.fakes.without_memory import parameters_without_memory

USER_CODE = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_batch():
    return torch.randn(16, 8), torch.randn(16, 1)


def make_nothing():
    return None


class Net(L.LightningModule):
    def __init__(self, width, num_layers=4):
        super().__init__()
        self.register_buffer("scales", torch.arange(1, 3).float())
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x) * self.scales[0]
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithLoader(Net):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=8)


class WithExample(Net):
    def __init__(self, width=16):
        super().__init__(width)
        self.example_input_array = torch.randn(4, 8)


class Branching(WithLoader):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0:  # the line to be named
                x = -x
        return self.last(x)


class Failing(WithLoader):
    def training_step(self, batch, batch_idx):
        return self(batch[0] @ torch.ones(3, 3)).sum()  # the line that fails


class ReadsWeights(WithLoader):
    def __init__(self, width=8):
        super().__init__(width)
        self.norm_at_start = self.first.weight.norm().item()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_net.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_net", raising=False)
    return tmp_path


def checked(*arguments: str) -> str:
    stream = io.StringIO()
    run_check(["--check", *arguments], Console(file=stream))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("arguments", "looked_at"),
    [
        (
            ["user_net:Net", "width=32", "--batch", "user_net:make_batch"],
            "training_step, on the first batch of --batch",
        ),
        (["user_net:WithLoader", "width=32"], "training_step, on the first batch of its train_dataloader"),
        (["user_net:WithExample"], "forward, on its example_input_array"),
        (["user_net:ReadsWeights"], "training_step, on the first batch of its train_dataloader"),
    ],
)
def test_module_that_can_be_cut_shows_units_cuts_stages_and_what_crosses(
    folder: Path, arguments: list[str], looked_at: str
) -> None:
    text = checked(*arguments, "--stages", "3")
    assert "can be cut into 3 stages" in text
    assert f"recorded: {looked_at}" in text
    assert "units: 6; possible cuts: 5, before each unit but the first; at most 6 stages" in text
    for stage in range(3):
        assert f"stage {stage} on rank {stage}: " in text
    width = 32 if "width=32" in arguments else 16 if "user_net:WithExample" in arguments else 8
    crossing = [line for line in text.splitlines() if "→ stage" in line]
    assert len(crossing) == 2 and all(f", {width}] float32, " in line for line in crossing)


def test_constructor_arguments_come_from_a_file_and_from_the_command_line(folder: Path) -> None:
    (folder / "arguments.yaml").write_text("width: 24\nnum_layers: 7\n")
    text = checked("user_net:WithLoader", "--config", str(folder / "arguments.yaml"), "num_layers=2")
    num_parameters = 8 * 24 + 24 + 2 * (24 * 24 + 24) + 24 + 1
    assert f"{num_parameters / 1e3:.3g} k parameters, 4 units" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["user_net:Branching", "width=8"], ["cannot be cut", "user_net.py:54 in forward", "'layers.1'"]),
        (["user_net:Failing", "width=8"], ["RuntimeError", "user_net.py:61 in training_step"]),
        (["user_net:WithLoader", "width=8", "--stages", "9"], ["9 stages need at least 9 units", "calls 6"]),
        (["user_net:Net", "width=8"], ["has no batch", "--batch", "train_dataloader()", "example_input_array"]),
        (["user_net:Net", "width=8", "--batch", "user_net:make_nothing"], ["make_nothing", "not a batch"]),
        (["user_net:Net"], ["width is missing", "key=value"]),
        (["user_net:Net", "widht=8"], ["widht is not one of its arguments", "width is missing", "width, num_layers"]),
        (["user_net:Net", "width"], ["'width' is not a constructor argument"]),
        (["user_net"], ["must be written as my_package.my_module:Name"]),
        (["user_nett:Net"], ["cannot import user_nett", "neither installed nor in"]),
        (["user_net:Nett"], ["user_net has no Nett", "WithLoader"]),
        (["user_net:make_batch"], ["not a LightningModule class"]),
    ],
)
def test_what_keeps_a_module_from_being_checked_is_one_message_and_exit_code_1(
    folder: Path, arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        check_class(["--check", *arguments])
    error = capsys.readouterr().err
    assert error.strip().startswith("lightning-pp-plan: ")
    for part in said:
        assert part in error
    assert "Traceback" not in error


def test_check_of_a_config_stops_after_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["model.num_layers=2", "model.dim=16", "model.num_heads=2", "data.seq_len=16", "data.batch_size=4"]
    monkeypatch.setattr(sys, "argv", ["lightning-pp-plan", "--check", *tiny])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main()
    text = capsys.readouterr().out
    assert "ByteGPT: can be cut into 2 stages" in text
    assert "Schedules" not in text
    assert list(tmp_path.iterdir()) == []


def test_command_in_the_users_folder_finds_the_module_there(folder: Path) -> None:
    finished = run_forked(["--check", "user_net:Branching", "width=8"], folder, module="lightning_pp.cli.plan.command")
    assert finished.code == 1
    assert "user_net:Branching cannot be cut: " in finished.output and "user_net.py:54 in forward" in finished.output
    assert "Traceback" not in finished.output


def test_parameters_have_no_memory_and_everything_else_is_real() -> None:
    with parameters_without_memory():
        embedding = nn.Embedding(50_000_000, 64)  # 12.8 GB
        head = nn.Linear(64, 8, bias=False)
        head.weight = nn.Parameter(torch.ones(8, 64), requires_grad=False)
        tied = nn.Linear(64, 8, bias=False)
        tied.weight = head.weight
        norm = nn.BatchNorm1d(4)
        recurrent = nn.LSTM(4, 4)
    plain = nn.Linear(2, 2)
    for module in (embedding, head, tied, norm, recurrent):
        assert all(parameter.is_meta for parameter in module.parameters())
    assert tied.weight is head.weight and not head.weight.requires_grad
    assert all(weight.is_meta for weight in recurrent._flat_weights)
    assert norm.running_var is not None and norm.running_var.tolist() == [1.0] * 4
    assert not plain.weight.is_meta
