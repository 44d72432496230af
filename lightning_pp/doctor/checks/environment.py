"""Versions, drivers, devices and variables: known problems, and facts that an issue needs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_PACKAGES = ("lightning-pp", "torch", "lightning", "hydra-core", "omegaconf", "wandb", "triton")
_PREFIXES = (
    *("NCCL_", "CUDA_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "PYTORCH_"),
    *("GLOO_", "OMP_", "UCX_", "FI_", "SLURM_J"),
)
_FEWEST = {"torch": (2, 13), "lightning": (2, 6, 4)}
_HOST = "NCCL_HOSTID"
_LEAST_SHM_BYTES = _LEAST_LOCKED_BYTES = 1 << 30
_BASE = "lightning_pp is tested with the versions of its constraints.txt: pip install -c constraints.txt . there."

# Variables that are known to matter: name, the value that does, how bad it is, what it does, what to do.
_MATTERS = (
    ("CUDA_LAUNCH_BLOCKING", "1", Status.FAILURE, "the host waits for every kernel, also for receives", "Unset it."),
    ("NCCL_P2P_DISABLE", "1", Status.WARNING, "messages go through the memory of the host", "Unset it if you can."),
    ("NCCL_SHM_DISABLE", "1", Status.WARNING, "messages on one host go over the network", "Unset it if you can."),
    ("NCCL_IB_DISABLE", "1", Status.WARNING, "messages between hosts go over TCP", "Unset it if there is InfiniBand."),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", Status.WARNING, "the host waits for each message", "Unset it."),
    ("TORCH_NCCL_ENABLE_TIMING", "1", Status.WARNING, "every collective is timed", "Unset it for training."),
)


def look(rank: Rank) -> dict[str, Any]:
    """What this rank knows of itself."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "num_cpus": os.cpu_count(),
        "num_ranks_here": rank.num_ranks_here,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "has_compiler": any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))),
        "has_infiniband": os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        "has_ibverbs": find_library("ibverbs") is not None,
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }
    found["versions"]["torch"] = torch.__version__
    if rank.device.type == "cuda":
        found["cuda"] = _device_properties(rank)
        found["versions"]["NCCL"] = found["cuda"]["nccl"]
    return found


def judge(values: Sequence[dict[str, Any]]) -> list[Finding]:
    """Old versions, ranks that differ, variables that are known to matter, and too little of a machine."""
    problems = [*_version_findings(values), *_variable_findings(values), *_machine_findings(values)]
    mine = values[0]
    packages = ", ".join(f"{name} {mine['versions'][name]}" for name in ("torch", "lightning"))
    cuda = mine.get("cuda")
    device = (
        f"{cuda['name']}, driver {cuda['driver']}, CUDA {cuda['cuda']}, NCCL {cuda['nccl']}"
        if cuda
        else f"{mine['num_cpus']} CPUs"
    )
    hosts = len({value["host"] for value in values})
    text = f"{packages}, Python {mine['python']}; {device}; {len(values)} ranks on {hosts} host{'s'[: hosts > 1]}."
    return [Finding(Status.OK, text, details=list(values)), *problems]


def _version_findings(values: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    versions = [value["versions"] for value in values]
    for name, fewest in _FEWEST.items():
        old = next((rank for rank, own in enumerate(versions) if _numbers(own.get(name) or "0") < fewest), None)
        if old is not None:
            found = f"Rank {old} has {name} {versions[old].get(name)}, not {'.'.join(map(str, fewest))}."
            yield Finding(Status.FAILURE, found, _BASE)
    first = versions[0], values[0]["python"]
    other = next((rank for rank, value in enumerate(values) if (versions[rank], value["python"]) != first), None)
    if other is not None:
        names = [name for name in (*_PACKAGES, "NCCL") if versions[other].get(name) != versions[0].get(name)]
        found = f"Rank {other} has other versions than rank 0: {', '.join(names) or 'of Python'}."
        yield Finding(Status.FAILURE, found, "Install the same on all hosts.")


def _variable_findings(values: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    variables = values[0]["variables"]
    is_cuda = "cuda" in values[0]
    # ranks that share a device send by sockets on purpose
    on_purpose = "NCCL_" if _share_device(values) else "none"
    for name, value, status, effect, advice in _MATTERS:
        if variables.get(name) == value and is_cuda and not name.startswith(on_purpose):
            yield Finding(status, f"{name}={value} is set: {effect}.", advice)
    connections = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if is_cuda and connections != "32":
        found = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: work behind a posted receive may wait for its message."
        yield Finding(Status.WARNING, found, "Unset it: the strategy sets it to 32.")
    differing = sorted(
        name
        for name in set().union(*(value["variables"] for value in values))
        if name.startswith(("NCCL_", "CUDA_DEVICE_MAX"))
        and name != _HOST
        and len({value["variables"].get(name) for value in values}) > 1
    )
    if differing:
        found = f"Ranks differ in {', '.join(differing)}."
        yield Finding(Status.WARNING, found, "Set them the same for all ranks.")


def _machine_findings(values: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    is_cuda = "cuda" in values[0]
    mine = values[0]
    if is_cuda:
        if _share_device(values):
            found = f"{len(values)} ranks share one device. Each tells NCCL that it is a host of its own."
            yield Finding(Status.WARNING, found, "Do not read speeds or memory of several devices from this.")
        elif len(_devices(values)) < len(values):
            found = "Two ranks share one device, which NCCL refuses."
            advice = "Look at CUDA_VISIBLE_DEVICES and LOCAL_RANK; --share-device tries several ranks on one device."
            yield Finding(Status.FAILURE, found, advice)
        names = sorted({value["cuda"]["name"] for value in values})
        if len(names) > 1:
            advice = "Tell the strategy with rank_speeds=, or give all ranks one kind."
            yield Finding(Status.WARNING, f"Ranks have different devices: {', '.join(names)}.", advice)
        yield from _container_findings(mine)
    elif mine["num_ranks_here"] > mine["num_cpus"]:
        found = f"{mine['num_ranks_here']} processes share {mine['num_cpus']} CPUs, so measured times mean little."
        yield Finding(Status.WARNING, found, "Take fewer processes (--devices) to measure.")
    shm = mine["shm_bytes"]
    if shm is not None and shm < _LEAST_SHM_BYTES:
        found = f"/dev/shm has {shm / 2**20:.0f} MiB, which loaders with workers and NCCL share."
        yield Finding(Status.WARNING, found, "In a container: --ipc=host or --shm-size=8g.")


def _devices(values: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(value["host"], value["cuda"]["uuid"]) for value in values if "cuda" in value}


def _share_device(values: Sequence[dict[str, Any]]) -> bool:
    """Whether ranks are on one device and NCCL takes each for a host of its own, so that it does not refuse them."""
    names = {value["variables"].get(_HOST) for value in values}
    return 0 < len(_devices(values)) < len(values) == len(names)


def _container_findings(mine: dict[str, Any]) -> list[Finding]:
    """What images and containers with devices often lack."""
    locked, infiniband = mine["locked_bytes"], mine["has_infiniband"]
    over_tcp = "The host has InfiniBand, but libibverbs is missing: NCCL sends over TCP."
    may_lock = f"A process may lock {locked / 2**20:g} MiB of memory. NCCL locks more for InfiniBand."
    lift = "ulimit -l unlimited; in a container: --ulimit memlock=-1 --cap-add IPC_LOCK --device /dev/infiniband."
    compiler = "There is no C++ compiler, which strategy.compile=true and Triton need."
    lacks = [
        (not mine["has_compiler"], compiler, "Install g++."),
        (infiniband and not mine["has_ibverbs"], over_tcp, "Install libibverbs1."),
        (infiniband and 0 <= locked < _LEAST_LOCKED_BYTES, may_lock, lift),
    ]
    return [Finding(Status.WARNING, found, advice) for applies, found, advice in lacks if applies]


def _device_properties(rank: Rank) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(rank.device)
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", rank.device.index)),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "topology": _output_of("nvidia-smi", "topo", "-m") if rank.rank == 0 else "",
    }


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts[:3])


_TITLE = "versions, drivers, devices and variables, and whether all ranks have the same"
CHECKS = [Check("environment", _TITLE, look, judge, fewest_ranks=1, limit_s=60.0, advice=_BASE)]
