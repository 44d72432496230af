"""What autograd saves in a forward, on the host until its backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_pp.runtime.offloading import Offloader, SavedTensors, address_of

CPU = torch.device("cpu")


class Gated(nn.Module):
    """Its product is saved in two parts of one memory, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.both, self.down = nn.Linear(64, 128), nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return self.down((torch.sigmoid(gate) * value * value) @ self.scale)


def gradients(module: nn.Module, around: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    around(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return [each for each in found if each is not None]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_gradients_are_the_same_and_each_memory_is_copied_once(share: float) -> None:
    module, offloader = Gated(), Offloader(CPU)
    host_bytes: list[int] = []

    def around(x: Tensor) -> Tensor:
        saved = SavedTensors(offloader, {address_of(module.scale)}, share)  # type: ignore[arg-type]
        with saved.around_forward():
            output: Tensor = module(x)
        host_bytes.append(offloader.host_bytes)
        saved.offload()
        saved.reload()
        saved.hand_over()
        return output

    expected, found = gradients(module, module), gradients(module, around)
    assert len(expected) == len(found) == 5
    assert all(map(torch.equal, expected, found))
    # the product of twice the size, its gate's sigmoid, that times value, and what scale makes; not x, scale or weights
    number = {0.25: 1, 0.5: 2, 1.0: 5}[share]
    assert host_bytes == [number * 64 * 64 * 4]
    assert offloader.host_bytes == 0


def test_memory_of_the_device_is_free_between_offload_and_reload() -> None:
    saved = SavedTensors(Offloader(CPU), ())
    with saved.around_forward():
        x = torch.randn(64, 64).requires_grad_() * 2
        storage = x.untyped_storage()
        output = (x * x).sum()
    before = torch.multiprocessing.reductions.StorageWeakRef(storage)
    del x, storage
    saved.offload()
    assert before.expired()
    with pytest.raises(RuntimeError, match="before the RELOAD"):
        output.backward()


def test_a_tensor_that_is_edited_after_it_was_saved_is_an_error() -> None:
    saved = SavedTensors(Offloader(CPU), ())
    weight = torch.randn(64, 64).requires_grad_()
    with saved.around_forward():
        x = weight * 2
        (x * x).sum()
        x.add_(1)
    with pytest.raises(RuntimeError, match="edited in place"):
        saved.offload()
