"""The doctor finds nothing on a machine that is well, and each fault that is planted in what it looks at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planted import FAULTS, plant, plant_more

import lightning_pp
from lightning_pp.doctor.checks import all_checks, environment
from lightning_pp.doctor.checks.failures import judge_ends
from lightning_pp.doctor.child import Options
from lightning_pp.doctor.command import main
from lightning_pp.doctor.findings import Row, Status
from lightning_pp.doctor.run import examine
from lightning_pp.doctor.teams import Team
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.hardware.links import links_measured
from lightning_pp.rank_processes import Outcome

TITLES = [check.title for check in all_checks()]


def statuses(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in json.loads(path.read_text())["findings"]:
        found.setdefault(finding["check"], set()).add(finding["status"])
    return found


def examined(plant: Any, faults: Any, limit_s: float = float("inf")) -> dict[str, list[Row]]:
    rows = examine(Team(2), Options(only=list(faults), is_quick=True, limit_s=limit_s, prepare=plant))
    return {title: [row for row in rows if row.check == title] for title in faults}


def test_two_processes_that_are_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "of" / "this.json"
    assert main(["--device", "cpu", "--devices", "2", "--quick", "--json", str(path)]) == 0
    found = statuses(path)
    assert list(found) == TITLES
    assert set.union(*found.values()) == {"ok"}
    data = json.loads(path.read_text())
    assert data["status"] == "ok" and data["num_ranks"] == 2 and data["seconds"] < 180
    (ranks,) = [finding["details"] for finding in data["findings"] if finding["check"] == "environment"]
    assert [rank["versions"]["lightning"] for rank in ranks] == [pytest.importorskip("lightning").__version__] * 2
    printed = capsys.readouterr().out
    for title in TITLES:
        assert re.search(rf"│ {re.escape(title)} +│ ok ", printed), printed
    assert str(path.name) in printed.replace("\n", "")


@pytest.mark.nightly
def test_four_processes_that_are_well(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    only = [word for name in ("channels", "queued-receives", "parity") for word in ("--only", name)]
    assert main(["--device", "cpu", "--devices", "4", "--quick", "--json", str(path), *only]) == 0
    data = json.loads(path.read_text())
    assert data["num_ranks"] == 4
    of_check = {finding["check"]: finding for finding in data["findings"] if finding["status"] != "not applicable"}
    assert set(of_check) == {"channels", "queued-receives", "parity"}
    assert len(of_check["channels"]["details"]) == 4
    assert sum(len(rank["links"]) for rank in of_check["channels"]["details"]) == 6  # pairs of four ranks
    inside, between = links_measured(path)
    assert inside is not None and inside.bytes_per_s > 0 and inside.latency_ms > 0 and between is None
    assert {case["replicas"] for case in of_check["parity"]["details"][0]} == {1, 2}
    for rank in of_check["parity"]["details"]:
        # sums in another order leave something, so that nothing at all would mean that nothing was compared
        assert any(case["difference"] > 0 for case in rank)


def shared(folder: Path, num_ranks: int, *arguments: str) -> dict[str, Any]:
    """What the doctor writes of ranks that share a device, or a CPU as each on a host of its own."""
    path = folder / "shared.json"
    assert main(["--device", "cpu", "--share-device", str(num_ranks), "--quick", "--json", str(path), *arguments]) == 0
    with pytest.raises(ConfigurationError, match="its ranks shared a device"):
        links_measured(path)
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def test_ranks_that_share_a_device_are_hosts_of_their_own(tmp_path: Path) -> None:
    only = [word for title in ("environment", "channels") for word in ("--only", title)]
    data = shared(tmp_path, 2, *only)
    assert data["shares_device"] and data["status"] == "ok"
    (ranks,) = [finding["details"] for finding in data["findings"] if finding["check"] == "environment"]
    assert [rank["variables"]["NCCL_HOSTID"] for rank in ranks] == ["rank-0", "rank-1"]
    assert [rank["num_ranks_here"] for rank in ranks] == [1, 1]
    assert {rank["variables"]["NCCL_NET"] for rank in ranks} == {"Socket"}


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_four_ranks_that_share_a_device(tmp_path: Path) -> None:
    found = [(finding["check"], finding["status"]) for finding in shared(tmp_path, 4)["findings"]]
    assert found == [(title, "ok") for title in TITLES]


@pytest.mark.gpu
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_four_ranks_that_share_a_cuda_device(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    assert main(["--share-device", "4", "--quick", "--json", str(path)]) == 0
    assert [title for title, told in statuses(path).items() if "ok" in told] == TITLES


@pytest.mark.nightly
def test_planted_faults_are_found() -> None:
    rows = examined(plant, FAULTS)
    expected = {
        "environment": r"Rank 1 has torch 2\.9\.1\+cu126, not 2\.13",
        "channels": "Other bytes arrived than were sent: rank 0 to 1, 1 to 0",
        "parity": r"Not as on one device after 3 steps: zb_h1 in 32-true by 0\.0\d+ \(\S+ on rank 0\); 1f1b in bf16",
        "failures (an exception)": "Rank 0 ended without saying that rank 1 failed",
    }
    assert set(expected) == set(FAULTS)
    for title, text in expected.items():
        bad = [row.finding for row in rows[title] if row.finding.status in (Status.WARNING, Status.FAILURE)]
        assert any(re.search(text, finding.found) for finding in bad), (title, rows[title])
        assert all(finding.advice for finding in bad)


def failure_of(title: str, limit_s: float = float("inf")) -> Row:
    """The only finding of a check with a fault of :data:`MORE_FAULTS`."""
    (row,) = examined(plant_more, [title], limit_s)[title]
    assert row.finding.status is Status.FAILURE
    return row


@pytest.mark.nightly
def test_a_message_that_is_lost_is_found_within_the_limit() -> None:
    row = failure_of("queued-receives", limit_s=12.0)
    text = r"ank 0 \(two receives queued on each channel, round \d+ of 20\) had not ended after \d+ s"
    assert re.search(text, row.finding.found), row
    assert "receives.py" in row.outcomes[0].output and "queue_two" in row.outcomes[0].output  # where it hangs


def test_a_rank_that_goes_on_is_found() -> None:
    row = failure_of("failures (out of memory)")
    assert "Rank 0 ended as if nothing had happened when rank 1 failed" in row.finding.found, row


@pytest.mark.nightly
def test_a_rank_that_stays_is_found_within_the_limit() -> None:
    row = failure_of("failures (SIGKILL)", limit_s=15.0)
    assert re.search(r"Ranks 0 had not ended \d+ s after rank 1 failed", row.finding.found), row


def of_rank(number: int, **variables: str) -> dict[str, Any]:
    """What a rank with a device would tell of itself."""
    return {
        "host": "node0",
        "python": "3.11.7",
        "versions": dict.fromkeys(("torch", "lightning", "lightning-pp"), "2.13.0") | {"lightning": "2.6.6"},
        "num_cpus": 8,
        "num_ranks_here": 2,
        "shm_bytes": 1 << 34,
        "has_compiler": True,
        "has_infiniband": True,
        "has_ibverbs": True,
        "locked_bytes": -1,
        "variables": variables,
        "cuda": {"name": "H100", "uuid": f"u{number}", "driver": "570", "cuda": "12.8", "nccl": "2.27.3"},
    }


def test_what_is_known_of_variables_and_devices() -> None:
    assert [finding.status for finding in environment.judge([of_rank(0), of_rank(1)])] == [Status.OK]
    blocking = environment.judge([of_rank(0, CUDA_LAUNCH_BLOCKING="1"), of_rank(1, CUDA_LAUNCH_BLOCKING="1")])
    assert blocking[1].status is Status.FAILURE and "CUDA_LAUNCH_BLOCKING=1" in blocking[1].found
    (_, few) = environment.judge([of_rank(i, CUDA_DEVICE_MAX_CONNECTIONS="1") for i in range(2)])
    assert few.status is Status.WARNING and "CUDA_DEVICE_MAX_CONNECTIONS=1" in few.found
    (_, shared) = environment.judge([of_rank(0), of_rank(0)])
    assert shared.status is Status.FAILURE and "share one device" in shared.found
    by_sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_NET": "Socket"}
    (_, told_apart) = environment.judge([of_rank(0, NCCL_HOSTID=f"rank-{rank}", **by_sockets) for rank in range(2)])
    assert told_apart.status is Status.WARNING and "2 ranks share one device" in told_apart.found
    (_, slow) = environment.judge(
        [of_rank(rank, NCCL_HOSTID=f"rank-{rank}", NCCL_P2P_DISABLE="1") for rank in range(2)]
    )
    assert slow.status is Status.WARNING and "NCCL_P2P_DISABLE=1" in slow.found
    (_, differing) = environment.judge([of_rank(0), of_rank(1, NCCL_ALGO="Ring")])
    assert differing.status is Status.WARNING and "NCCL_ALGO" in differing.found


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ({"has_compiler": False}, "no C++ compiler"),
        ({"has_ibverbs": False}, "NCCL sends over TCP"),
        ({"locked_bytes": 8 << 20}, "may lock 8 MiB"),
    ],
)
def test_what_containers_lack(lacks: dict[str, Any], sentence: str) -> None:
    (_, found) = environment.judge([{**of_rank(0), **lacks}, of_rank(1)])
    assert found.status is Status.WARNING and sentence in found.found
    without = {"has_infiniband": False, "has_ibverbs": False, "locked_bytes": 0}
    assert len(environment.judge([{**of_rank(0), **without}, of_rank(1)])) == 1


def test_another_nccl_on_one_rank() -> None:
    ranks = [of_rank(0), of_rank(1)]
    for rank, nccl in zip(ranks, ("2.27.3", "2.26.2"), strict=True):
        rank["versions"]["NCCL"] = nccl
    (_, found) = environment.judge(ranks)
    assert found.status is Status.FAILURE and found.found == "Rank 1 has other versions than rank 0: NCCL."


def test_ranks_that_end_late_are_a_failure() -> None:
    victim = Outcome(1, noted="failing", noted_after_s=3.0, exit_code=-9, seconds=3.1)
    named = {"error": "RuntimeError: This rank ended because rank 1 was killed", "exit_code": 1}
    assert judge_ends([Outcome(0, seconds=4.0, **named), victim])[0].status is Status.OK
    (finding,) = judge_ends([Outcome(0, seconds=70.0, **named), victim])
    assert finding.status is Status.FAILURE and "had not ended 67 s after rank 1 failed" in finding.found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--devices", "0"], "--devices 0 must be at least 1"),
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--share-device", "1"], "--share-device 1: give 2 or more, without srun or torchrun"),
        (["--share-device", "2", "--devices", "2"], "not allowed with argument"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cpu", *arguments])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_tasks_of_srun_are_told_to_use_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cpu"])
    assert stop.value.code == 2 and "srun has started 4 copies of the doctor" in capsys.readouterr().err


def test_one_process_is_told_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main(["--device", "cpu", "--devices", "1", "--only", "parity", "--json", str(path)]) == 0
    (finding,) = json.loads(path.read_text())["findings"]
    assert finding["status"] == "not applicable" and finding["found"] == "It needs 2 processes, and there is 1."


def test_what_has_no_time_left_is_told() -> None:
    rows = examine(Team(2), Options(only=["channels"], longest_s=0.0))
    assert [row.finding.status for row in rows] == [Status.WARNING]
    assert rows[0].finding.advice == "Run it by itself: --only channels."


@pytest.mark.nightly
def test_a_check_that_begins_in_time_has_its_whole_limit() -> None:
    (row,) = examine(Team(2), Options(only=["parity"], is_quick=True, longest_s=1.5))
    assert row.finding.status is Status.OK and row.seconds > 1.5, row.finding.found


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_of_it_under_torchrun(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "report.json"
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
            *("-m", "lightning_pp.doctor", "--device", "cpu", "--longest", "400", "--json", str(path)),
        ],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(Path(lightning_pp.__file__).parents[1]),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"Each of the {num_ranks} processes of the launcher watches one rank" in finished.stdout
    found = statuses(path)
    assert [title for title, told in found.items() if "ok" in told] == TITLES
    assert "failure" not in set.union(*found.values())
