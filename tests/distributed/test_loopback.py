"""A job on one node listens on the loopback interface alone."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from listening_script import fit_twice
from pool import WorkerPool
from script_runs import run_launched

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
SCRIPT = Path(__file__).with_name("listening_script.py")


reads_sockets = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells there who listens")


def check_addresses(folder: Path) -> None:
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(ranks) and {address for rank in ranks for address in rank} <= LOOPBACK


@reads_sockets
def test_ranks_whose_first_has_the_store_listen_on_the_loopback_interface(pool: WorkerPool, tmp_path: Path) -> None:
    """The process of rank 0 has the job's store, as where a Trainer has started the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    pool.run(fit_twice, tmp_path, world_size=2, environ=store)
    check_addresses(tmp_path)


@pytest.mark.nightly
@reads_sockets
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_ranks_listen_on_the_loopback_interface(
    launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ended = run_launched([*launcher, str(SCRIPT), str(tmp_path)], tmp_path)
    assert ended.code == 0, ended.output
    check_addresses(tmp_path)
