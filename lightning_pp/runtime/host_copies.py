"""Copying small tensors to the host without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies that can be read once :meth:`wait` has returned, also in another thread.

    A copy of a tensor on the host is made at once, so what becomes of the tensor afterwards does not show in it.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._devices: set[torch.device] = set()

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, with a storage of its own."""
        source = tensor.detach()
        if not source.is_cuda or source.layout is not torch.strided or source.is_nested:
            return source.cpu() if not source.is_cpu else source.clone()
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        self._devices.add(source.device)
        return host

    def end(self) -> None:
        """After the last copy."""
        for device in self._devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> None:
        """Waits until the device has made all copies."""
        for event in self._events:
            event.synchronize()
