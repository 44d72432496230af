"""The pool's own behaviour: environment, clean-up between runs, and what happens when ranks fail, die or hang."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from pool import Failure, WorkerError, WorkerPool


@dataclass
class Point:
    x: torch.Tensor


def environment() -> dict[str, str]:
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {**{key: os.environ[key] for key in keys}, "pid": str(os.getpid())}


def summed_ranks(point: Point, scale: float = 1.0) -> torch.Tensor:
    value = point.x * scale + dist.get_rank()
    dist.all_reduce(value)
    return value


def lightning_environment() -> tuple[bool, int, int]:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    return TorchElasticEnvironment.detect(), TorchElasticEnvironment().world_size(), rank_zero_only.rank


def leave_a_mess() -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("PATH")


def state() -> tuple[bool, torch.dtype, bool, bool, bool, int]:
    return (
        dist.is_initialized(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        "LEFT_BEHIND" in os.environ,
        "PATH" in os.environ,
        torch.get_num_threads(),
    )


def fail_on_rank(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has a problem")
    return dist.get_rank()


def fail_while_peers_wait(hang: bool) -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has a problem")
    if hang:
        time.sleep(600)
    dist.barrier()


def fail_while_a_thread_receives() -> None:
    """As a fit does that fails while messages between the ranks are under way."""
    group = dist.new_group()
    threading.Thread(target=receive_for_ever, args=(group,), daemon=True).start()
    time.sleep(0.05)
    raise ValueError("a problem on every rank")


def receive_for_ever(group: dist.ProcessGroup) -> None:
    while True:
        dist.irecv(torch.empty(4), group=group, group_src=1 - dist.get_rank()).wait()


def leave_a_thread_on_rank_zero() -> None:
    if os.environ["RANK"] == "0":
        threading.Thread(target=sleep_forever, daemon=True).start()


KEPT: list[dist.ProcessGroup] = []


def keep_a_group() -> None:
    dist.init_process_group("gloo")
    KEPT.append(dist.new_group())


def seconds_of_meeting(late_rank: int, delay_s: float) -> float:
    start = time.monotonic()
    if os.environ["RANK"] == str(late_rank):
        time.sleep(delay_s)
    dist.init_process_group("gloo")
    dist.barrier()
    return time.monotonic() - start


def die_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os._exit(17)


def sleep_forever() -> None:
    time.sleep(600)


def return_unpicklable() -> object:
    return lambda: None


def test_environment_is_that_of_torchrun(pool: WorkerPool) -> None:
    first, second = pool.run(environment), pool.run(environment)
    for rank, environ in enumerate(first):
        assert (environ["RANK"], environ["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert first[0]["MASTER_PORT"] == first[1]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    assert [environ["pid"] for environ in first] == [environ["pid"] for environ in second], "the workers stay alive"
    assert pool.run(lightning_environment) == [(True, 2, 0), (True, 2, 1)]


def test_arguments_and_results_travel(pool: WorkerPool) -> None:
    results = pool.run(summed_ranks, Point(torch.ones(3)), scale=2.0, world_size=3, process_group=True)
    assert [result.tolist() for result in results] == [[9.0] * 3] * 3


def test_workers_are_reset_between_runs(pool: WorkerPool) -> None:
    clean = (False, torch.float32, True, False, True, 1)
    assert pool.run(state) == [clean, clean]
    pool.run(leave_a_mess)
    assert pool.run(state) == [clean, clean]


def test_failure_reports_every_rank(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as raised:
        pool.run(fail_on_rank, 1, process_group=True)
    text = str(raised.value)
    assert "failed on 1 of 2 ranks" in text and "rank 0: returned" in text
    assert "ValueError: rank 1 has a problem" in text and "in fail_on_rank" in text


def test_failure_ends_the_wait_of_peers(pool: WorkerPool) -> None:
    pids = [environ["pid"] for environ in pool.run(environment)]
    report = pool.run(fail_while_peers_wait, False, process_group=True, expect_failure=True)
    assert report.seconds < 10 and report.failures[0] is not None
    assert isinstance(report.failures[1], Failure)
    assert (report.failures[1].type, report.failures[1].message) == ("ValueError", "rank 1 has a problem")
    assert not set(pids) & {environ["pid"] for environ in pool.run(environment)}, "no process of a failed run is kept"


def test_ranks_that_returned_are_replaced_if_another_one_failed(pool: WorkerPool) -> None:
    pids = [environ["pid"] for environ in pool.run(environment, world_size=3)]
    report = pool.run(fail_on_rank, 1, process_group=True, expect_failure=True)
    assert report.failures[0] is None
    later = [environ["pid"] for environ in pool.run(environment, world_size=3)]
    assert later[2] == pids[2], "a worker that was not in the run goes on"
    assert not set(pids[:2]) & set(later)


def test_failed_runs_with_receives_under_way_do_not_disturb_the_next(pool: WorkerPool) -> None:
    for _ in range(5):
        report = pool.run(fail_while_a_thread_receives, process_group=True, expect_failure=True)
        assert [failure and failure.type for failure in report.failures] == ["ValueError", "ValueError"]
        assert report.seconds < 10
        assert [result.item() for result in pool.run(summed_ranks, Point(torch.ones(1)), process_group=True)] == [3, 3]


def test_a_worker_with_a_thread_left_is_replaced(pool: WorkerPool) -> None:
    pids = [environ["pid"] for environ in pool.run(environment)]
    pool.run(leave_a_thread_on_rank_zero)
    later = [environ["pid"] for environ in pool.run(environment)]
    assert later[0] != pids[0] and later[1] == pids[1]


def test_a_group_that_stays_is_told_with_the_test_that_left_it() -> None:
    workers = WorkerPool()
    workers.run(leave_a_mess)
    workers.run(keep_a_group, world_size=1)
    pids = [environ["pid"] for environ in workers.run(environment)]
    assert len(set(pids)) == 2
    name = "test_a_group_that_stays_is_told_with_the_test_that_left_it"
    with pytest.warns(UserWarning, match=rf"stayed alive in workers:\n\d+ threads after .*{name}.* on rank 0$"):
        workers.close()


def test_a_worker_is_replaced_after_so_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.RUNS_OF_A_WORKER", 2)
    workers = WorkerPool()
    pids = [workers.run(environment, world_size=1)[0]["pid"] for _ in range(4)]
    workers.close()
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_ranks_find_each_other_at_once_in_any_order(pool: WorkerPool) -> None:
    """Rank 1 asks for the store first, and is not sent away to ask again later."""
    pool.run(environment)
    waited = max(pool.run(seconds_of_meeting, late_rank=0, delay_s=0.3))
    assert waited < 0.9


def test_hanging_peer_is_killed_after_the_grace_period(pool: WorkerPool) -> None:
    pids = [environ["pid"] for environ in pool.run(environment)]
    report = pool.run(fail_while_peers_wait, True, process_group=True, expect_failure=True, grace=0.5)
    assert report.failures[0] is not None and report.failures[0].type == "WorkerHung"
    assert "in fail_while_peers_wait" in report.failures[0].traceback
    assert report.seconds < 10
    assert pids[0] not in {environ["pid"] for environ in pool.run(environment)}


def test_dead_worker_and_timeout_are_reported_and_replaced(pool: WorkerPool) -> None:
    report = pool.run(die_on_rank_one, expect_failure=True)
    assert report.failures[0] is None
    assert report.failures[1] is not None and report.failures[1].message == "exit code 17"
    with pytest.raises(WorkerError, match="no result after the timeout of 1 s"):
        pool.run(sleep_forever, world_size=1, timeout=1)
    assert len(pool.run(environment)) == 2


def test_misuse_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"world_size=5 is outside 1\.\.4"):
        pool.run(environment, world_size=5)
    with pytest.raises(ValueError, match="not at the top of its module"):
        pool.run(lambda: None)
    with pytest.raises(WorkerError, match="pickle"):
        pool.run(return_unpicklable, world_size=1)
    with pytest.raises(AssertionError, match="expected to fail"):
        pool.run(environment, world_size=1, expect_failure=True)
