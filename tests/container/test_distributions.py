"""The wheel and the source distribution, built here, and the commands of the wheel in an empty folder."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import lightning_pp

ROOT = Path(__file__).parents[2]

NOT_SOURCES = shutil.ignore_patterns(
    ".git", "__pycache__", "*.egg-info", "PKG-INFO", "build", "dist", "outputs", "multirun", ".venv", "venv", ".*_cache"
)
NO_ADDRESS = {"REPOSITORY_URL": "", "GITHUB_WORKSPACE": ""}
OF_GITHUB = {"GITHUB_SERVER_URL": "https://code.example", "GITHUB_REPOSITORY": "group/project", "GITHUB_SHA": "0f1e2d"}


def built(kind: str, sources: Path, folder: Path, **variables: str) -> Path:
    """What the build backend makes of ``sources``, as pip and build ask it: wheel, sdist or editable."""
    folder.mkdir(exist_ok=True)
    code = f"from hatchling import build; build.build_{kind}({str(folder)!r})"
    command, environment = [sys.executable, "-c", code], {**os.environ, **NO_ADDRESS, **variables}
    finished = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("sources") / "tree", symlinks=True, ignore=NOT_SOURCES))


@pytest.fixture(scope="module")
def distributions(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("distributions")
    source = built("sdist", tree, folder / "source")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return source, built("wheel", folder / source.name.removesuffix(".tar.gz"), folder / "wheel")


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def test_what_pip_shows_is_there(distributions: tuple[Path, Path]) -> None:
    """Author, licence, summary and the Pythons; the home page is that of the build, and tested below."""
    metadata = metadata_of(distributions[1])
    assert (metadata["Author"], metadata["License-Expression"]) == ("The lightning_pp authors", "Apache-2.0")
    assert metadata["Summary"] == "Pipeline parallelism for unmodified LightningModules"
    classifiers = metadata.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} <= set(classifiers)


def test_the_source_tree_has_no_links(tree: Path) -> None:
    assert not [path for path in tree.rglob("*") if path.is_symlink()]


def test_the_source_distribution_has_what_it_takes_to_build_and_test(
    tree: Path, distributions: tuple[Path, Path]
) -> None:
    with tarfile.open(distributions[0]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    for folder in ("lightning_pp", "tests", "docs", "conf", "recipes", "launch", "docker", "benchmarks", "template"):
        there = {path.relative_to(tree).as_posix() for path in (tree / folder).rglob("*") if path.is_file()}
        assert there and not there - names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "Dockerfile", "hatch_build.py"} <= names
    assert {".ci/run", ".dockerignore", ".github/workflows/ci.yml", "mkdocs.yml"} <= names


def test_the_wheel_has_the_package_alone(tree: Path, distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    information = f"lightning_pp-{lightning_pp.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"lightning_pp", information}
    of_the_package = {path.relative_to(tree).as_posix() for path in tree.glob("lightning_pp/**/*") if path.is_file()}
    yaml = {
        f"lightning_pp/{path.relative_to(tree).as_posix()}"
        for folder in ("conf", "recipes")
        for path in (tree / folder).rglob("*.yaml")
    }
    assert len(yaml) > 50
    assert {name for name in names if not name.startswith(information)} == of_the_package | yaml


def test_a_source_tree_is_used_where_it_lies(tree: Path, tmp_path: Path) -> None:
    """Installed in place it is a line in a .pth file; on the path alone it finds its groups all the same."""
    with zipfile.ZipFile(built("editable", tree, tmp_path / "editable")) as archive:
        (line,) = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert archive.read(line).decode().split() == [str(tree)]
    code = (
        "from hydra import compose, initialize\n"
        "from lightning_pp.conf.search_path import yaml_folders\n"
        "print(*yaml_folders())\n"
        "with initialize(version_base='1.3'):\n"
        "    print(compose('config', ['recipe=two_tower']).model._target_)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [
        *(str(tree / "conf"), str(tree / "recipes")),
        "lightning_pp.recipes.two_tower.TwoTower",
    ]


def links(markdown: str) -> Iterator[str]:
    """Where the links and pictures of a text lead, as another parser finds them."""
    for block in MarkdownIt("commonmark").enable("table").parse(markdown):
        for token in block.children or []:
            if target := token.attrs.get("href") or token.attrs.get("src"):
                yield str(target)


def test_links_of_the_readme_lead_to_the_repository_of_the_build(tree: Path, tmp_path: Path) -> None:
    address = "https://code.example/group/project"
    readme = (tree / "README.md").read_text()
    relative = [target for target in links(readme) if "://" not in target]
    assert len(relative) > 20
    checked_out = {**OF_GITHUB, "GITHUB_WORKSPACE": str(tree)}
    for variables, revision in ((checked_out, "0f1e2d"), ({"REPOSITORY_URL": f"{address}/"}, "HEAD")):
        metadata = metadata_of(built("wheel", tree, tmp_path / revision, **variables))
        expected = [f"{address}/blob/{revision}/{target}" for target in relative]
        assert [target for target in links(str(metadata.get_payload())) if target.startswith(address)] == expected
        assert set(metadata.get_all("Project-URL") or []) == {
            f"Homepage, {address}",
            f"Repository, {address}",
            f"Documentation, {address}/blob/{revision}/docs/index.md",
            f"Changelog, {address}/blob/{revision}/CHANGELOG.md",
            f"Issues, {address}/issues",
        }


def test_without_an_address_an_index_shows_no_dead_link(tree: Path, distributions: tuple[Path, Path]) -> None:
    metadata = metadata_of(distributions[1])
    text = str(metadata.get_payload())
    assert metadata.get_content_type() == "text/plain" and metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None
    assert not [target for target in links(text) if "://" not in target]
    relative = r"\[([^\]]*)\]\((?:[^)\s]+\.md[^)\s]*|LICENSE)\)"
    assert text.strip() == re.sub(relative, r"\1", (tree / "README.md").read_text()).strip()


def test_the_repository_of_a_workflow_that_only_installs_is_not_named(tree: Path, tmp_path: Path) -> None:
    wheel = built("wheel", tree, tmp_path / "wheel", GITHUB_WORKSPACE=str(tmp_path), **OF_GITHUB)
    assert metadata_of(wheel).get_all("Project-URL") is None


def test_a_wheel_of_a_source_distribution_keeps_its_address(tree: Path, tmp_path: Path) -> None:
    source = built("sdist", tree, tmp_path / "source", REPOSITORY_URL="https://code.example/project")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    metadata = metadata_of(built("wheel", tmp_path / source.name.removesuffix(".tar.gz"), tmp_path / "wheel"))
    assert "Repository, https://code.example/project" in (metadata.get_all("Project-URL") or [])
    assert "(https://code.example/project/blob/HEAD/docs/running/plan.md)" in str(metadata.get_payload())


@pytest.mark.nightly
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


@pytest.mark.nightly
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
