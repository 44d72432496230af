"""Tries the package on one GPU, where several ranks share it, and writes a report; on a machine without one, on CPUs.

    python benchmarks/one_gpu.py                                  # 25 minutes at most; writes one_gpu_report.txt
    python benchmarks/one_gpu.py --minutes 10 --report FILE.txt

It runs the doctor with two and with four ranks on the device, then the tests of tests/one_gpu, then all other tests
marked ``gpu``, whose ranks share the device too. Each line of the report is one check: passed, failed or not run, its
seconds, its name, and figures or the reason. The output of everything is in FILE.log. The exit code is 1 if a check has
failed. Nothing else should run on the device meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

ROOT = Path(__file__).resolve().parents[1]
OF_ONE_DEVICE = ("tests/one_gpu",)
OTHERS = (
    *("tests/runtime/split_backward", "tests/parity/training", "tests/parity/schedules/test_nccl.py"),
    *("tests/telemetry/test_throughput.py", "tests/callbacks/test_profiling.py"),
)
LONGEST_TEST_S = 300
_RESULTS = "ONE_GPU_RESULTS"


class Line(NamedTuple):
    """One check of the report: its result, seconds, name, and figures or the reason."""

    result: str
    seconds: float
    name: str
    told: str

    def __str__(self) -> str:
        return f"{self.result:7} {self.seconds:6.1f} s  {self.name}{f': {self.told}' if self.told else ''}"


def first_line() -> str:
    """What the report is of."""
    if not torch.cuda.device_count():
        return (
            f"CPU FORM: this machine has no CUDA device. Ranks are processes over gloo (torch {torch.__version__}). "
            "Nothing in this report shows what CUDA or NCCL do."
        )
    told = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return (
        f"ONE DEVICE: {told.name}, {told.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, NCCL {nccl}. Ranks "
        "share it over sockets. Nothing in this report shows the speed or the links of several devices."
    )


def lines_of_doctor(num_ranks: int, environ: dict[str, str], until: float, log: TextIO) -> list[Line]:
    """The doctor's findings for so many ranks on the device."""
    name = f"doctor, {num_ranks} ranks"
    left_s = until - time.monotonic()
    if left_s < 60:
        return [Line("not run", 0.0, name, "the time was up")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "doctor.json"
        command = [sys.executable, "-m", "lightning_pp.doctor", "--share-device", str(num_ranks), "--quick"]
        command += ["--longest", f"{max(10.0, min(300.0, left_s - 90)):.0f}", "--json", str(path)]
        try:
            subprocess.run(command, cwd=folder, env=environ, stdout=log, stderr=log, timeout=left_s, check=False)
            findings = json.loads(path.read_text())["findings"]
        except (subprocess.TimeoutExpired, OSError) as error:
            return [Line("failed", 0.0, name, f"it wrote no findings ({type(error).__name__})")]
    results = {"ok": "passed", "warning": "passed", "failure": "failed", "not applicable": "not run"}
    return [
        Line(
            results[finding["status"]],
            finding["seconds"],
            f"{name}, {finding['check']}",
            f"{'WARNING ' if finding['status'] == 'warning' else ''}{finding['found']}",
        )
        for finding in findings
    ]


def lines_of_tests(
    paths: Sequence[str], chosen: Sequence[str], environ: dict[str, str], until: float, log: TextIO
) -> list[Line]:
    """What pytest says of each test that is collected; of those that it did not come to, too."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *paths, *chosen]
    collected = subprocess.run(
        [*pytest, "--collect-only"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    names = [line for line in collected.stdout.splitlines() if "::" in line]
    left_s = until - time.monotonic()
    found: dict[str, Line] = {}
    if names and left_s > 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.jsonl"
            environ = {**environ, _RESULTS: str(path)}
            command = [*pytest, "-p", "one_gpu", "--timeout", str(LONGEST_TEST_S)]
            try:
                subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=log, timeout=left_s, check=False)
            except subprocess.TimeoutExpired:
                log.write("The time was up, and pytest was ended.\n")
            for entry in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
                line = Line(**entry)
                if line.name not in found or line.result == "failed":
                    found[line.name] = line
    return [found.get(name, Line("not run", 0.0, name, "the time was up")) for name in names]


def pytest_runtest_logreport(report: Any) -> None:
    """In the process of pytest, which has this file as a plugin: writes down what came of a test."""
    if report.when != "call" and report.passed:
        return
    told = [str(value) for name, value in report.user_properties if name == "figure"]
    if report.skipped:
        told = [str(report.longrepr[2]).removeprefix("Skipped: ")]
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(report.longrepr if crash is None else crash.message).strip()
        told.append(message.partition("\n")[0][:300])
    result = {"passed": "passed", "failed": "failed", "skipped": "not run"}[report.outcome]
    line = Line(result, report.duration, report.nodeid, "; ".join(told))
    with Path(os.environ[_RESULTS]).open("a") as file:
        file.write(json.dumps(line._asdict()) + "\n")


def main() -> None:
    """Runs everything and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=Path("one_gpu_report.txt"))
    parser.add_argument("--minutes", type=float, default=25.0, help="at most; 25")
    arguments = parser.parse_args()
    began = time.monotonic()
    until = began + 60 * arguments.minutes
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    of_device = ["--nightly", *(["-m", "gpu"] if torch.cuda.device_count() else [])]
    lines: list[Line] = []
    with arguments.report.with_suffix(".log").open("w") as log:
        parts: list[Callable[[], list[Line]]] = [
            lambda: lines_of_doctor(2, environ, until, log),
            lambda: lines_of_doctor(4, environ, until, log),
            lambda: lines_of_tests(OF_ONE_DEVICE, of_device, environ, until, log),
            lambda: lines_of_tests(OTHERS, ["--nightly", "-m", "gpu"], environ, until, log),
        ]
        for part in parts:
            found = part()
            print(*found, sep="\n", flush=True)
            lines += found
            arguments.report.write_text(report_of(lines, time.monotonic() - began))
    print(f"Written to {arguments.report}.")
    sys.exit(int(any(line.result == "failed" for line in lines)))


def report_of(lines: Sequence[Line], seconds: float) -> str:
    """The report of what has been done by now."""
    counts = Counter(line.result for line in lines)
    told = ", ".join(f"{counts[result]} {result}" for result in ("passed", "failed", "not run"))
    return "\n".join([first_line(), *map(str, lines), f"{told}; {seconds / 60:.1f} minutes."]) + "\n"


if __name__ == "__main__":
    main()
