"""Sends over a backend whose works tell when they are done: what a receipt acknowledges is let go of at once."""

from __future__ import annotations

import weakref
from unittest.mock import patch

import torch

from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.sends import Send, Sends


class Work:
    """As NCCL's: holds its tensor until somebody waits; the host learns late that it is done."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.is_done = False

    def wait(self) -> None:
        self.tensor = None

    def is_completed(self) -> bool:
        return self.is_done


def sent(sends: Sends, receiver: int, *, is_gradient: bool = False) -> tuple[Work, weakref.ref[torch.Tensor]]:
    tensor = torch.zeros(4)
    work = Work(tensor)
    sends.add(receiver, Send(work, tensor, is_gradient))
    return work, weakref.ref(tensor)


def test_receipts_let_go_of_tensors_that_the_host_believes_under_way() -> None:
    sends = Sends(works_tell=True)
    kept = [sent(sends, 1) for _ in range(3)]
    others = sent(sends, 2)
    sends.acknowledge(1, 2)
    assert [tensor() is None for _, tensor in kept] == [True, True, False]
    assert others[1]() is not None
    sends.acknowledge(1, 3)
    assert kept[2][1]() is None


def test_sends_that_are_done_by_themselves_count_among_those_acknowledged() -> None:
    sends = Sends(works_tell=True)
    first, second = sent(sends, 1), sent(sends, 1)
    first[0].is_done = second[0].is_done = True
    first[0].wait(), second[0].wait()
    third, fourth = sent(sends, 1), sent(sends, 1)  # drops the first two
    assert first[1]() is second[1]() is None
    sends.acknowledge(1, 3)
    assert third[1]() is None and fourth[1]() is not None


def test_gradients_of_the_step_before_are_let_go_at_the_first_receipt_of_the_next() -> None:
    sends = Sends(works_tell=True)
    _, tensor = sent(sends, 1, is_gradient=True)
    sends.end_step()
    assert tensor() is not None
    _, of_next = sent(sends, 1)
    sends.acknowledge(1, 0)
    assert tensor() is None and of_next() is not None


def test_draining_waits_for_the_device() -> None:
    device = torch.device("cuda", 0)
    with patch("torch.cuda.current_stream") as stream:
        Transport([0, 1], 0, torch.device("cpu")).drain()
        stream.assert_not_called()
        Transport([0, 1], 0, device).drain()
        stream.assert_called_once_with(device)
        stream.return_value.synchronize.assert_called_once_with()
