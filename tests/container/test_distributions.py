"""The wheel and the source distribution, built here, and the commands of the wheel in an empty folder."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lightning_pp

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.nightly

NOT_SOURCES = shutil.ignore_patterns(
    ".git", "__pycache__", "*.egg-info", "build", "dist", "outputs", "multirun", ".venv", ".*_cache"
)


def built(kind: str, sources: Path, folder: Path) -> Path:
    """What the build backend makes of ``sources``, as pip and build ask it."""
    folder.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    finished = subprocess.run([sys.executable, "-c", code], cwd=sources, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("distributions")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NOT_SOURCES)
    source = built("sdist", folder / "tree", folder / "source")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return source, built("wheel", folder / source.name.removesuffix(".tar.gz"), folder / "wheel")


def test_the_source_distribution_has_what_it_takes_to_build_and_test(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    for folder in ("tests", "docs", "conf", "recipes", "launch", "docker", "benchmarks", "template"):
        there = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert not {name for name in there if "__pycache__" not in name} - names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "Dockerfile", "lightning_pp/py.typed"} <= names


def test_the_wheel_has_the_package_alone(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names} == {
        "lightning_pp",
        f"lightning_pp-{lightning_pp.__version__}.dist-info",
    }
    for folder in ("conf", "recipes"):
        kept = {path for path in (ROOT / folder).rglob("*") if path.suffix in (".yaml", ".py")}
        assert {f"lightning_pp/{path.relative_to(ROOT).as_posix()}" for path in kept} <= names


def test_the_template_trains_with_the_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """Copied out of the source distribution, with its own package in the folder and the wheel's sources alone."""
    source, wheel = distributions
    project, installed = tmp_path / "project", tmp_path / "installed"
    shutil.copytree(source.parents[1] / source.name.removesuffix(".tar.gz") / "template", project)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    finished = subprocess.run(
        [sys.executable, "-m", "my_project.train", "trainer.max_steps=40", "trainer.enable_progress_bar=false"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (loss,) = re.findall(r"^train_loss after 40 steps: (.+)$", finished.stdout, re.MULTILINE)
    assert float(loss) < 1.0  # a guess among four classes has 1.39
    with zipfile.ZipFile(built("wheel", project, tmp_path / "theirs")) as archive:
        assert {"my_project/train.py", "my_project/model.py", "my_project/conf/config.yaml"} <= set(archive.namelist())


def test_its_commands_work_in_an_empty_folder(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """With the dependencies of this environment, and the sources of the wheel alone."""
    installed, folder = tmp_path / "installed", tmp_path / "empty"
    folder.mkdir()
    with zipfile.ZipFile(distributions[1]) as archive:
        archive.extractall(installed)

    (metadata,) = installed.glob("*.dist-info")
    scripts = configparser.ConfigParser()
    scripts.read(metadata / "entry_points.txt")

    def run(command: str, *arguments: str) -> str:
        module, _, function = scripts["console_scripts"][command].partition(":")
        script = folder / command
        script.write_text(f"from {module} import {function}\n\nif __name__ == '__main__':\n    {function}()\n")
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        finished = subprocess.run(
            [sys.executable, str(script), *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    assert run("lightning-pp", "--version").startswith(f"lightning-pp {lightning_pp.__version__} (torch ")
    trained = run("lightning-pp", "trainer.max_steps=2", "trainer.enable_progress_bar=false")
    assert "Pipeline stages" in trained
    (checkpoint,) = folder.glob("outputs/*/*/checkpoints/step2.ckpt")
    run("lightning-pp-plan", "--check")
    run("lightning-pp-export", str(checkpoint), "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size > 1_000_000
