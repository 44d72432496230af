"""Tokens in a batch, wall time between batches, and memory."""

from __future__ import annotations

import resource
from collections import UserDict
from typing import Any

import pytest
import torch

from lightning_pp.telemetry.memory import read_peak_memory_gib
from lightning_pp.telemetry.throughput import BatchClock, Throughput, count_tokens

IDS = torch.zeros(4, 7, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "num_tokens"),
    [
        ({"input_ids": IDS, "labels": IDS}, 28),
        ((torch.zeros(4, 3, 5), IDS.to(torch.int32)), 28),
        (UserDict({"mask": torch.ones(4, 9, dtype=torch.bool), "input_ids": IDS}), 28),
        (IDS, 28),
        ([torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, 3, dtype=torch.int64)], 24),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)), 0),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), 0),
        ("text", 0),
    ],
)
def test_tokens_are_the_first_ids(batch: Any, num_tokens: int) -> None:
    assert count_tokens(batch) == num_tokens


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_wall_time_goes_from_one_end_to_the_next_without_pauses() -> None:
    now = Clock()
    clock = BatchClock(now)
    now.seconds += 50  # a sanity check
    clock.restart()
    now.seconds += 2
    first = clock.batch_ended(8, 80)
    clock.pause()
    now.seconds += 30
    clock.resume()
    now.seconds += 4
    second = clock.batch_ended(4, 40)
    assert (first, second) == (Throughput(1, 2.0, 8, 80), Throughput(1, 4.0, 4, 40))
    both = first + second
    assert (both.step_ms, both.samples_per_s, both.tokens_per_s) == (3000.0, 2.0, 20.0)
    clock.resume()  # without a pause
    now.seconds += 1
    assert clock.batch_ended(1, 0).seconds == 1.0


def test_batches_without_ids_have_no_tokens_per_second() -> None:
    assert Throughput(1, 2.0, 8, 0).tokens_per_s is None
    assert Throughput().samples_per_s == 0.0


def test_peak_memory_of_the_process_is_the_most_it_ever_held() -> None:
    device = torch.device("cpu")
    before = read_peak_memory_gib(device)
    assert 0.05 < before < 100
    # more than this process ever held, or the one that started it, which getrusage counts as well
    most = max(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20) + 0.125
    held = torch.ones(int(most * 2**30), dtype=torch.uint8)
    after = read_peak_memory_gib(device)
    assert after > most
    assert after == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, abs=0.02)
    del held
    assert read_peak_memory_gib(device) == pytest.approx(after, abs=0.01)  # the kernel's count is approximate


@pytest.mark.gpu
def test_peak_memory_of_a_gpu_counts_from_the_last_reading() -> None:
    device = torch.device("cuda", 0)
    read_peak_memory_gib(device)
    held = torch.ones(256 * 1024 * 1024, device=device)
    assert read_peak_memory_gib(device) >= 1.0
    del held
    read_peak_memory_gib(device)
    assert read_peak_memory_gib(device) < 1.0
