"""Two emulated nodes on one Linux machine, and a link between them with a latency and a bandwidth.

A node is a network namespace whose only way out is a TUN device. A process carries the packets from one device to the
other: a packet leaves when those before it have left, at the bandwidth, and arrives the latency later. Nothing is lost,
and queues have no limit, so TCP's own windows are what is under way. ``tc netem`` does the same, in kernels that have
it. Needs root, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import time
from collections import deque
from multiprocessing.context import ForkContext, ForkProcess
from types import TracebackType

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "wire"
_MTU = 9000  # jumbo frames
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_AT_ONCE = 64


class TwoNodes:
    """Makes the nodes and the link, and removes them at the end of a ``with``.

    Args:
        gbit_per_s: 10⁹ bits per second, in each direction.
        latency_ms: One way.

    Attributes:
        names: Of the namespaces: ``ip netns exec NAME COMMAND`` runs a command on a node.
    """

    def __init__(self, gbit_per_s: float, latency_ms: float) -> None:
        self.names = tuple(f"lpp{os.getpid()}-{number}" for number in range(2))
        self._speed = (gbit_per_s * 1e9 / 8, latency_ms / 1e3)
        self._devices: list[int] = []
        self._carrier: ForkProcess | None = None

    def __enter__(self) -> TwoNodes:
        try:
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("netns", "add", name)
                self._devices.append(_tun(device := f"{name[-12:]}t"))
                _ip("link", "set", device, "netns", name, "name", DEVICE)
                inside = ("netns", "exec", name, "ip")
                _ip(*inside, "link", "set", "lo", "up")
                _ip(*inside, "address", "add", f"{address}/24", "dev", DEVICE)
                _ip(*inside, "link", "set", DEVICE, "mtu", str(_MTU), "up")
            self._carrier = ForkContext().Process(target=_carry, args=(tuple(self._devices), *self._speed), daemon=True)
            self._carrier.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.join()
        for device in self._devices:
            os.close(device)  # which removes it
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _tun(name: str) -> int:
    """A TUN device of packets without headers; reading and writing do not wait."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _carry(devices: tuple[int, int], bytes_per_s: float, latency_s: float) -> None:
    """Carries packets from each device to the other, for ever."""
    under_way: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
    free_at = dict.fromkeys(devices, 0.0)
    other = dict(zip(devices, reversed(devices), strict=True))
    while True:
        due = [packets[0][0] for packets in under_way.values() if packets]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select(devices, [], [], wait)
        for device in ready:
            for _ in range(_MOST_AT_ONCE):
                try:
                    packet = os.read(device, _MTU)
                except BlockingIOError:
                    break
                free_at[device] = max(free_at[device], time.monotonic()) + len(packet) / bytes_per_s
                under_way[other[device]].append((free_at[device] + latency_s, packet))
        now = time.monotonic()
        for device, packets in under_way.items():
            while packets and packets[0][0] <= now:
                os.write(device, packets.popleft()[1])
