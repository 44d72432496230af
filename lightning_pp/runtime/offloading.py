"""Keeps the tensors that autograd saved in F on the host until their backward: OFFLOAD and RELOAD.

Hooks around F see what autograd saves. Each memory is copied once, whole, however many tensors lie in it; parameters,
buffers, the batch and what was received stay. On CUDA the host's memory is pinned, and each direction has a stream::

    end of F:  the stream of copies waits for F, and copies to the host
    OFFLOAD:   F's stream waits for the copies; the device's memory is free for what follows
    RELOAD:    memory is taken again; the other stream waits for what precedes, and copies back
    I or B:    F's stream waits for that

So no allocation is used on two streams that do not wait for each other. On the CPU copies are made at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pp.runtime._torch_private import view_base
from lightning_pp.split._torch_private import version_of

_LEAST_BYTES = 4096
"""A memory of less stays on the device; a copy takes about ten microseconds however small it is."""


def address_of(tensor: Tensor) -> int:
    """Where the memory of ``tensor`` begins; 0 if it is not one piece of memory."""
    return tensor.untyped_storage().data_ptr() if type(tensor) is Tensor and tensor.layout is torch.strided else 0


class Offloader:
    """Copies to the host and back on one device.

    Args:
        device: The device that computes.

    Attributes:
        host_bytes: What is on the host now.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_bytes = 0
        is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy_out(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Copies on the host, and what says when they are made."""
        is_pinned = self._out is not None
        self.host_bytes += sum(map(len, sources))
        with self._on(self._out):
            copies = [torch.empty(len(each), dtype=torch.uint8, pin_memory=is_pinned) for each in sources]
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=is_pinned)
            return copies, None if self._out is None else self._out.record_event()

    def copy_back(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """New memory on the device, and what says when it has what ``copies`` have."""
        targets = [torch.empty(len(copy), dtype=torch.uint8, device=self.device) for copy in copies]
        with self._on(self._back):
            for target, copy in zip(targets, copies, strict=True):
                target.copy_(copy, non_blocking=self._back is not None)
            self.host_bytes -= sum(map(len, copies))
            return targets, None if self._back is None else self._back.record_event()

    def wait(self, made: Any) -> None:
        """What is computed from now on waits for copies."""
        if made is not None:
            torch.cuda.current_stream(self.device).wait_event(made)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):  # None: as it is
            yield


class _Memory:
    """A storage in which autograd has saved tensors.

    Attributes:
        num_bytes: Its size.
        content: All its bytes; None while it is on the host alone.
        seen: The tensors in it, each with its version then.
    """

    __slots__ = ("content", "num_bytes", "seen")

    def __init__(self, content: Tensor) -> None:
        self.content: Tensor | None = content
        self.num_bytes = len(content)
        self.seen: list[tuple[Tensor, int]] = []

    def check(self) -> None:
        """Raises :class:`RuntimeError` if a tensor in it was edited since autograd saved it, as autograd does."""
        for tensor, version in self.seen:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"A tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} was edited in place between the "
                    "forward that saved it and its backward. Edit a copy of it (clone())."
                )


class _Packed(NamedTuple):
    """The object that autograd keeps in place of a tensor."""

    memory: _Memory
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """The tensors that autograd saves in the F of one microbatch on one stage.

    Args:
        offloader: Copies it.
        kept: Addresses of memories that stay on the device.
        share: Of the bytes of all others, how many are moved, at most; the largest memories are.
    """

    def __init__(self, offloader: Offloader, kept: Collection[int], share: float = 1.0) -> None:
        self._offloader = offloader
        self._kept = kept
        self._share = share
        self._memories: dict[int, _Memory] = {}
        self._moved: list[_Memory] = []
        self._copies: list[Tensor] = []
        self._made: Any = None

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Within runs F; its end begins the copies to the host."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        by_size = sorted(self._memories.values(), key=lambda memory: memory.num_bytes, reverse=True)
        left = self._share * sum(memory.num_bytes for memory in by_size)
        for memory in by_size:
            if memory.num_bytes <= left:
                left -= memory.num_bytes
                self._moved.append(memory)
        self._memories.clear()
        contents = [memory.content for memory in self._moved if memory.content is not None]
        self._copies, self._made = self._offloader.copy_out(contents)

    def offload(self) -> None:
        """OFFLOAD: the device's memory is free.

        Raises:
            RuntimeError: A tensor was edited after autograd had saved it.
        """
        self._offloader.wait(self._made)
        for memory in self._moved:
            memory.check()
            memory.content = None
            memory.seen.clear()

    def reload(self) -> None:
        """RELOAD: it is copied back."""
        contents, self._made = self._offloader.copy_back(self._copies)
        self._copies.clear()
        for memory, content in zip(self._moved, contents, strict=True):
            memory.content = content

    def hand_over(self) -> None:
        """Before I or B, which frees what it has used."""
        self._offloader.wait(self._made)
        self._moved.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device == self._offloader.device
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return tensor
        base = view_base(tensor)
        origin = tensor if base is None else base
        if isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad):
            return tensor
        storage, address = tensor.untyped_storage(), address_of(tensor)
        num_bytes = storage.nbytes()
        if num_bytes < _LEAST_BYTES or address in self._kept:
            return tensor
        with torch.no_grad():
            memory = self._memories.get(address)
            if memory is None:
                content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (num_bytes,), (1,))
                memory = self._memories[address] = _Memory(content)
            memory.seen.append((tensor.detach(), version_of(tensor)))
        return _Packed(memory, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        packed.memory.check()
        content = packed.memory.content
        if content is None:
            raise RuntimeError("A backward began before the RELOAD of what its forward had saved on the host.")
        with torch.no_grad():
            empty = torch.empty(0, dtype=packed.dtype, device=content.device)
            return empty.set_(content.untyped_storage(), packed.offset, packed.shape, packed.stride)
