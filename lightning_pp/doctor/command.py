"""``lightning-pp-doctor``: looks at the machine before a training does.

One run, in order::

    processes   one for each device of this host, or two on a CPU; under torchrun one for each of its processes
    checks      one after the other, each in new processes with a time limit, so that a hang is a finding
    report      a table of what was found and what to do; a JSON file to attach to an issue

The exit code is 1 if anything has failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from lightning_pp.doctor.checks import all_checks
from lightning_pp.doctor.child import LONGEST_S, Options
from lightning_pp.doctor.findings import Status
from lightning_pp.doctor.report import print_report, worst_status, write_json
from lightning_pp.doctor.run import examine
from lightning_pp.doctor.teams import LauncherTeam, Team, is_launched
from lightning_pp.versions import version_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit code."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    num_devices = torch.cuda.device_count()
    device_type = asked.device or ("cuda" if num_devices else "cpu")
    num_tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if device_type == "cuda" and not num_devices:
        parser.error("there is no CUDA device on this host that torch can use; see nvidia-smi, or take --device cpu")
    if asked.devices is not None and asked.devices < 1:
        parser.error(f"--devices {asked.devices} must be at least 1")
    if device_type == "cuda" and (asked.devices or 0) > num_devices:
        advice = "; --share-device puts several ranks on one" if num_devices == 1 else ""
        parser.error(f"--devices {asked.devices} is more than the {num_devices} that this host has{advice}")
    if asked.share_device is not None and (asked.share_device < 2 or num_tasks > 1 or is_launched()):
        parser.error(
            f"--share-device {asked.share_device}: give 2 or more, without srun or torchrun: it starts them itself"
        )
    if num_tasks > 1 and "RANK" not in os.environ:
        parser.error(
            f"srun has started {num_tasks} copies of the doctor, which do not know of each other: srun "
            "--ntasks-per-node 1 torchrun --nnodes ... --nproc-per-node ... -m lightning_pp.doctor"
        )
    if asked.share_device is not None:
        team = Team(asked.share_device, shares_device=True)
    elif is_launched():
        team = LauncherTeam()
    else:
        team = Team(asked.devices or (num_devices if device_type == "cuda" else 2))
    if asked.devices is not None and asked.devices != team.num_ranks:
        parser.error(f"--devices {asked.devices} is not the launcher's {team.num_ranks} processes: leave --devices out")
    options = Options(device_type, asked.only or (), asked.quick, asked.longest)
    return _run(team, options, asked.json)


def _run(team: Team, options: Options, path: Path) -> int:
    console = Console(stderr=False, width=None if sys.stdout.isatty() else 120, quiet=not team.is_leader)
    if team.is_leader and isinstance(team, LauncherTeam):
        console.print(
            f"Each of the {team.num_ranks} processes of the launcher watches one rank of each check. Ranks have "
            "processes of their own, since they may hang, fail or be killed."
        )
    started = time.monotonic()
    with console.status("") as status:
        rows = examine(team, options, lambda title: status.update(f"{title} ..."))
    if not team.is_leader:
        return 0
    num_ranks, device_type, seconds = team.num_ranks, options.device_type, round(time.monotonic() - started, 1)
    print_report(console, rows, num_ranks, device_type, seconds)
    about = {"num_ranks": num_ranks, "device_type": device_type, "shares_device": team.shares_device}
    write_json(path, rows, **about, seconds=seconds)
    console.print(f"Written to {path}: attach it to an issue.")
    return int(worst_status(rows) is Status.FAILURE)


def _parser() -> argparse.ArgumentParser:
    names = list(dict.fromkeys(check.name for check in all_checks()))
    parser = argparse.ArgumentParser(
        prog="lightning-pp-doctor",
        description="Checks in under three minutes whether pipelines run correctly on this machine.",
        epilog="Checks: " + "; ".join(dict.fromkeys(f"{check.name}: {check.shows}" for check in all_checks())),
    )
    parser.add_argument("--version", action="version", version=version_line("lightning-pp-doctor"))
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--devices", type=int, help="number of processes (default: one for each CUDA device, or 2 on a CPU)"
    )
    number.add_argument(
        "--share-device", type=int, metavar="N", help="N processes on the first CUDA device, or on a CPU: a trial"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a device")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="CHECK", help="run only this check; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and trainings")
    parser.add_argument("--json", type=Path, default=Path("lightning-pp-doctor.json"), help="file to write")
    parser.add_argument(
        "--longest", type=float, default=LONGEST_S, help=f"seconds after which no check begins; {LONGEST_S:.0f}"
    )
    return parser
