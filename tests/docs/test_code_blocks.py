"""The code blocks of the documentation: scripts of the guides run, names exist, and overrides compose."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import environment, run_forked
from hydra import compose, initialize_config_module
from pool import WorkerPool

import lightning_pp.conf  # noqa: F401  registers the schema
from lightning_pp import PipelineParallelStrategy

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
CONFIGS = {"lightning-pp": "config", "lightning-pp-plan": "plan", "lightning-pp-verify": "verify"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def scripts(page: Path) -> dict[str, str]:
    """The Python blocks of a guide, by the file name in their first line."""
    found = {}
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, f"{page.name}: a block without a file name in its first line:\n{block}"
        found[name.group(1)] = block
    return found


def write_scripts(guide: str, folder: Path) -> dict[str, str]:
    files = scripts(DOCS / "start" / f"{guide}.md")
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


def run_script(folder: str, name: str) -> dict[str, float]:
    """Run a file as its user does, in its folder, and return what its trainer has logged."""
    before, modules = os.getcwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        trainer = runpy.run_path(name, run_name="__main__")["trainer"]
        assert trainer.state.finished
        return {key: float(value) for key, value in trainer.callback_metrics.items()}
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        for module in set(sys.modules) - modules:
            if Path(folder) in Path(getattr(sys.modules[module], "__file__", None) or "/").parents:
                del sys.modules[module]


def run_guide(pool: WorkerPool, guide: str, folder: Path) -> dict[str, dict[str, float]]:
    """Run the scripts of a guide for CPUs, in the order of the page, each in as many processes as it says."""
    files = write_scripts(guide, folder)
    logged = {}
    for name, text in files.items():
        devices = re.search(r"\bdevices=(\d)", text)
        if devices is not None and 'accelerator="cpu"' in text:
            logged[name] = pool.run(run_script, str(folder), name, world_size=int(devices.group(1)), timeout=120)[0]
    return logged


def test_the_tutorial_gives_the_same_numbers_on_one_device_and_as_a_pipeline(pool: WorkerPool, tmp_path: Path) -> None:
    logged = run_guide(pool, "tutorial", tmp_path)
    assert set(logged) == {"plain.py", "pipeline.py", "use.py"}
    assert logged["pipeline.py"] == pytest.approx(logged["plain.py"], rel=1e-4)
    assert logged["plain.py"]["val_loss"] == pytest.approx(3.6, abs=0.1)  # as the page says
    assert logged["use.py"]["val_loss"] == pytest.approx(logged["pipeline.py"]["val_loss"], rel=1e-4)


@pytest.mark.nightly  # by day these commands run in tests/verification, tests/cli and tests/cli/plan/test_plan_check.py
def test_the_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    write_scripts("tutorial", tmp_path)
    text = "".join(blocks(DOCS / "start" / "tutorial.md", "bash")).replace("\\\n", " ")
    verify, check, train = (shlex.split(line) for line in text.splitlines())
    assert (verify[0], check[0], train[0]) == ("lightning-pp-verify", "lightning-pp-plan", "lightning-pp")
    verified = run_forked([*verify[1:], "steps=2"], tmp_path, module="lightning_pp.cli.verify", timeout_s=200)
    assert verified.code == 0, verified.output
    assert verified.output.endswith("EQUAL: the pipeline trains as one device does.\n"), verified.output
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".py"} <= {"__pycache__"}
    checked = run_forked(check[1:], tmp_path, module="lightning_pp.cli.plan.command")
    assert checked.code == 0 and "LanguageModel: can be cut into 2 stages" in checked.output, checked.output
    shorter = ["trainer.max_steps=2" if "max_steps" in word else word for word in train[1:]]
    trained = run_forked([*shorter, "logger=none", "trainer.enable_progress_bar=false"], tmp_path, num_processes=2)
    assert trained.code == 0 and list(tmp_path.glob("outputs/*/*/checkpoints/step2.ckpt")), trained.output


@pytest.mark.nightly
def test_the_comparison_of_the_tutorial_runs_as_a_script(tmp_path: Path) -> None:
    script = write_scripts("tutorial", tmp_path)["verified.py"]
    run = functools.partial(subprocess.run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    finished = run([sys.executable, "verified.py"])
    assert finished.returncode == 0 and finished.stdout.endswith("as one device does.\n"), finished
    (tmp_path / "unguarded.py").write_text(script.replace('__name__ == "__main__"', "True"))
    finished = run([sys.executable, "unguarded.py"])
    assert 'it has to stand under `if __name__ == "__main__":`' in finished.stdout, finished


def test_the_scripts_of_the_migration_guide_run(pool: WorkerPool, tmp_path: Path) -> None:
    logged = run_guide(pool, "migrating", tmp_path)
    assert set(logged) == {"plain.py", "ddp.py", "pipeline.py", "from_model_parallel.py"}
    assert logged["pipeline.py"] == pytest.approx(logged["plain.py"], rel=1e-4)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_and_arguments_of_this_package_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning_pp":
                module = importlib.import_module(node.module or "")
                assert not [each.name for each in node.names if not hasattr(module, each.name)], block
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "PipelineParallelStrategy":
                named = {each.arg for each in node.keywords}
                assert named <= set(inspect.signature(PipelineParallelStrategy).parameters), block


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of a page that take overrides, with these: (name of the primary config, overrides)."""
    found = []
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        command = re.match(r"(?:(lightning-pp(?:-plan|-verify)?)|torchrun .*-m lightning_pp)(?: |$)", line)
        if command is None:
            continue
        words = shlex.split(line[command.end() :], comments=True)
        if "--config-dir" not in words and not is_check_of_a_module(words):
            overrides = [word for word in words if "=" in word and not word.startswith("-")]
            found.append((CONFIGS[command.group(1) or "lightning-pp"], overrides))
    return found


def is_check_of_a_module(words: list[str]) -> bool:
    return "--check" in words and any(":" in word and "=" not in word for word in words)


@functools.cache
def devices_of(config: str, overrides: tuple[str, ...]) -> Any:
    with initialize_config_module(version_base="1.3", config_module="lightning_pp.conf"):
        return compose(config, overrides=list(overrides)).trainer.devices


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_overrides_compose(page: Path) -> None:
    for config, overrides in commands(page):
        assert devices_of(config, tuple(overrides)) in ("auto", *range(1, 17)), overrides
