"""Sockets of a job on one node: on the loopback interface, where no other host reaches them.

What listens takes part in the job without a password. torch has its key-value store listen on all interfaces, and gloo
on the one that the host's name stands for.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = ("localhost", "127.0.0.1")
_BACKLOG = 2048

_interface: str | None = None
_lock = threading.Lock()
_num_within = 0


def keep_gloo_on_loopback() -> None:
    """For a job on one node: groups that are made within :func:`gloo_on_loopback` listen on the loopback interface."""
    global _interface
    _interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Around the making of groups: gloo asks the environment for its interface then.

    Afterwards the environment is as before. Nothing changes where ``GLOO_SOCKET_IFNAME`` is set.
    """
    global _num_within
    with _lock:
        is_set = _interface is not None and (_num_within > 0 or _GLOO_INTERFACE not in os.environ)
        if is_set:
            os.environ[_GLOO_INTERFACE] = str(_interface)
            _num_within += 1
    try:
        yield
    finally:
        if is_set:
            with _lock:
                _num_within -= 1
                if _num_within == 0:
                    os.environ.pop(_GLOO_INTERFACE, None)


def store_on_loopback(address: str, port: int, rank: int, num_ranks: int, timeout: timedelta) -> Store | None:
    """The job's key-value store, whose server listens on the loopback interface alone.

    Args:
        address: Where the ranks look for it.
        port: Its port.
        rank: This process; 0 has the server.
        num_ranks: Processes of the job, all on this node.
        timeout: For a key that is waited for.

    Returns:
        None where torch has to make it: ``address`` is of another interface, ``torchrun`` has it already, or this
        process has one at that port from a run before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or address not in _LOOPBACK:
        return None
    listening = None
    if rank == 0:
        listening = _listening(port)
        if listening is None:
            return None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        num_ranks,
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listening,
    )
    # torch does the same where it makes the store
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]


def _listening(port: int) -> int | None:
    """Descriptor of a socket that listens on the loopback interface; None if the port is taken."""
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.1", port))
        own.listen(_BACKLOG)
    except OSError:
        own.close()
        return None
    return own.detach()
