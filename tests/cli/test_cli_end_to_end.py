"""The command line from start to report, launched by itself and by torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import TINY_RUN, Finished, run_command, run_forked, torchrun
from wandb_runs import config_of, of_type, records


def reported_path(finished: Finished, name: str) -> Path:
    match = re.search(rf"^{re.escape(name)}\s+(\S+)$", finished.output, flags=re.MULTILINE)
    assert match, finished.output
    return Path(match.group(1))


#: Starts a command twice, as ``srun`` starts two tasks.
TWO_TASKS = Path(__file__).parents[1] / "faults" / "jobs" / "two_tasks.py"
OWN_MODEL = """
import lightning as L
import torch


class MyModule(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.head = torch.nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        tokens = batch["input_ids"]
        logits = self.head(self.embedding(tokens[:, :-1]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        print("width", self.head.in_features)
        return torch.optim.SGD(self.parameters(), 0.1)
"""


@pytest.fixture(scope="module")
def own_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "my.txt").write_text("It is a truth universally acknowledged. " * 100)
    (folder / "more").mkdir()
    (folder / "more" / "notes.md").write_text("# Notes\n" * 200)
    return folder


def test_default_run_reports_stages_loss_and_paths_and_its_checkpoint_can_be_tested(own_text: Path) -> None:
    run = [*TINY_RUN, "data.files=[my.txt, more/*.md]", "strategy.check_first_batches=true"]
    finished = run_forked(run, own_text)
    assert finished.code == 0, finished.output
    for heading in ("stage", "units", "parameters", "F ms", "I ms", "W ms", "bubble", "wait ms", "peak GiB"):
        assert heading in finished.output
    assert re.search(r"^loss\s+5\.\d+ at the start, [345]\.\d+ at the end$", finished.output, flags=re.MULTILINE)
    assert re.search(r"^tokens per second\s+[\d,]+$", finished.output, flags=re.MULTILINE)
    assert re.search(r"^step\s+[\d.]+ ms, mean of the run", finished.output, flags=re.MULTILINE)
    checkpoint = reported_path(finished, "checkpoint")
    assert checkpoint.exists()
    wandb_run = reported_path(finished, "W&B run")
    assert list(wandb_run.glob("*.wandb"))

    # one output folder, with one log file: the second process wrote neither
    folders = list(own_text.glob("outputs/*/*"))
    assert len(folders) == 1
    assert [path.name for path in folders[0].glob("*.log")] == ["lightning_pp.log"]
    assert len(list(own_text.rglob("config.yaml"))) == 1 + len(list(wandb_run.rglob("config.yaml")))

    arguments = [*TINY_RUN, "data.files=[my.txt]", "mode=test", f"ckpt_path='{checkpoint}'", "logger=none"]
    tested = run_forked(arguments, own_text, num_processes=2)
    assert tested.code == 0, tested.output
    assert re.search(r"^test_loss\s+[345]\.\d+$", tested.output, flags=re.MULTILINE)


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_torchrun_gives_one_output_folder_and_one_report(own_text: Path, by_torchrun: bool) -> None:
    """With torchrun's environment in every run, and with torchrun itself at night: it takes long to start."""
    folder = own_text / f"torchrun_{by_torchrun}"
    folder.mkdir()
    arguments = [*TINY_RUN, "data.files=[../my.txt]", "logger=csv", "strategy.schedule=1f1b"]
    if by_torchrun:
        finished = run_command(arguments, folder, launcher=torchrun(2))
    else:
        finished = run_forked(arguments, folder, num_processes=2)
    assert finished.code == 0, finished.output
    assert finished.output.count("Pipeline stages") == 1
    assert reported_path(finished, "checkpoint").exists()
    assert [path.name for path in folder.iterdir()] == ["outputs"]
    assert len(list(folder.glob("outputs/*/*"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_multirun_under_another_launcher_runs_every_job(own_text: Path, launcher: str) -> None:
    folder = own_text / f"sweep_{launcher}"
    folder.mkdir()
    arguments = [*TINY_RUN, "--multirun", "data.files=[../my.txt]", "data.seed=1,2", "trainer.max_steps=2"]
    if launcher == "srun":
        finished = run_command(arguments, folder, launcher=(str(TWO_TASKS),))
    else:
        finished = run_forked(arguments, folder, num_processes=2)
    assert finished.code == 0, finished.output
    assert finished.output.count("Pipeline stages") == 2
    assert [path.name for path in folder.iterdir()] == ["multirun"]
    jobs = sorted(path for path in folder.glob("multirun/*/*/*") if path.is_dir())
    assert [path.name for path in jobs] == ["0", "1"]
    _check_one_wandb_run_each(folder, jobs)


@pytest.mark.nightly
def test_plain_multirun_gives_each_job_a_wandb_run(own_text: Path) -> None:
    folder = own_text / "plain"
    folder.mkdir()
    arguments = [*TINY_RUN, "--multirun", "data.files=[../my.txt]", "data.seed=1,2", "trainer.devices=1"]
    finished = run_forked([*arguments, "trainer.max_steps=2"], folder)
    assert finished.code == 0, finished.output
    _check_one_wandb_run_each(folder, sorted(path for path in folder.glob("multirun/*/*/*") if path.is_dir()))


def _check_one_wandb_run_each(folder: Path, jobs: list[Path]) -> None:
    found = [records(job) for job in jobs]
    runs = [of_type(each, "run")[0] for each in found]
    assert len({run["run_id"] for run in runs}) == 2
    assert {run["run_group"] for run in runs} == {str(jobs[0].parent.relative_to(folder))}
    for each, job, seed in zip(found, jobs, (1, 2), strict=True):
        config = config_of(each)
        assert (config["data"]["seed"], config["model"]["dim"], config["mode"]) == (seed, 16, "fit")
        assert config["logger"]["save_dir"] == str(job)
        assert [ended["exit_code"] for ended in of_type(each, "exit")] == [0]


def test_model_in_the_users_folder_is_found_with_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text(OWN_MODEL)
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "mine.yaml").write_text("_target_: my_package.MyModule\nwidth: 512\n")
    arguments = ["--config-dir", "my_conf", "model=mine", "model.width=24", "data.batch_size=4", "data.seq_len=32"]
    one_process = ["trainer.devices=1", "strategy=auto", "trainer.fast_dev_run=1", "logger=none"]
    finished = run_forked([*arguments, *one_process], tmp_path)
    assert finished.code == 0, finished.output
    assert "width 24" in finished.output


@pytest.mark.parametrize(
    ("more", "saved"),
    [
        ([], ["step4.ckpt"]),
        (["callbacks.checkpoint.every_n_train_steps=3"], ["step3.ckpt"]),
        (["callbacks.checkpoint.save_on_train_epoch_end=false"], []),
    ],
)
def test_a_model_without_a_validation_is_saved(tmp_path: Path, more: list[str], saved: list[str]) -> None:
    (tmp_path / "my_package.py").write_text(OWN_MODEL)
    own = [
        "recipe=own",
        "model._target_=my_package.MyModule",
        "+model.width=16",
        "data.batch_size=4",
        "data.seq_len=32",
    ]
    one_process = ["trainer.devices=1", "strategy=auto", "trainer.max_steps=4", "logger=none"]
    finished = run_forked([*own, *one_process, *more], tmp_path)
    assert finished.code == 0, finished.output
    assert [path.name for path in tmp_path.glob("outputs/*/*/checkpoints/*")] == saved
