"""A job on one node listens on the loopback interface alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
SCRIPT = Path(__file__).with_name("listening_script.py")


@pytest.mark.by_day(1)
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells there who listens")
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_ranks_listen_on_the_loopback_interface(launcher: tuple[str, ...], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), str(tmp_path)],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(ranks) and {address for rank in ranks for address in rank} <= LOOPBACK
