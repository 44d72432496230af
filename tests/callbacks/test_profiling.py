"""Traces of every rank with the actions of its program, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from monitored_fit import loader
from pipelined_fit import trainer
from pool import WorkerPool
from profiled_fit import fit_profiled, fit_profiled_until_it_fails, fit_refused
from small_models import TokenModel

from lightning_pp import MemorySnapshots, PipelineProfiler
from lightning_pp.callbacks.profiling.memory_snapshots import ran_out_of_memory
from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import build_schedule
from lightning_pp.strategy.faults.flight_recorder import record_nccl

NVTX = r"nvtx=True.*computes on cpu.*Leave nvtx out"


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_each_window_of_each_rank_has_every_action_of_its_program(pool: WorkerPool, tmp_path: Path) -> None:
    named = pool.run(fit_profiled, str(tmp_path), world_size=2, timeout=120)
    # one batch waits, one warms up, two are recorded; the second window is cut short by the end
    assert named == [[False, False, True, True, False, False, True]] * 2
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"rank000{rank}.{batch:06d}.pt.trace.json.gz" for rank in range(2) for batch in (4, 7)]
    programs = build_schedule("zb_h1", num_ranks=2, num_microbatches=2).programs
    for rank, program in enumerate(programs):
        expected = Counter(f"stage {a.stage} {a.kind.value} microbatch {a.microbatch}" for a in program)
        for batch, num_batches in ((4, 2), (7, 1)):
            events = events_of(tmp_path / f"rank000{rank}.{batch:06d}.pt.trace.json.gz")
            ranges = [event for event in events if event.get("cat") == "user_annotation" and event["ph"] == "X"]
            actions = [event for event in ranges if re.fullmatch(r"stage \d \w+ microbatch \d", event["name"])]
            assert Counter(e["name"] for e in actions) == {name: num_batches * n for name, n in expected.items()}
            waits = {e["name"] for e in ranges if e["name"].startswith("wait for ")}
            # rank 0 waits for gradients, rank 1 for what is passed forward
            kind = "F" if rank == 1 else "B"
            assert waits == {f"wait for stage {rank} {kind} microbatch {m}" for m in range(2)}
            # when a message ends after its window, torch writes to memory that the window has freed
            assert not {"gloo:send", "gloo:recv"} & {event.get("name") for event in events}
            # what an action runs lies within it
            products = [e for e in events if e.get("name") == "aten::addmm"]
            assert products
            within = [any(a["ts"] <= p["ts"] <= a["ts"] + a["dur"] for a in actions) for p in products]
            assert all(within)


def test_after_an_error_nothing_is_written_and_the_profiler_is_free(pool: WorkerPool, tmp_path: Path) -> None:
    outcomes = pool.run(fit_profiled_until_it_fails, str(tmp_path), world_size=2, timeout=120)
    assert all("the disk is gone" in failed and again is None for failed, again in outcomes)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0001.000001.pt.trace.json.gz"]


def test_what_cannot_be_profiled_is_refused_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    for nvtx, ranks, beside, memory in pool.run(fit_refused, str(tmp_path), world_size=2, timeout=120):
        assert re.search(NVTX, nvtx)
        assert re.search(r"ranks=\[0, 2\]\) names process 2, and the run has 2", ranks)
        assert re.search(r"Trainer\(profiler='pytorch'\).*Leave out one of them", beside)
        assert re.search(r"MemorySnapshots.*computes on cpu. Leave the callback out", memory)
    assert not list(tmp_path.iterdir())


def test_without_a_pipeline_there_are_traces_too(tmp_path: Path) -> None:
    profiler = PipelineProfiler(wait=0, warmup=1, active=1, dirpath=tmp_path)
    trainer(1, "auto", max_steps=3, callbacks=[profiler]).fit(TokenModel(), loader())
    (path,) = tmp_path.iterdir()
    assert any(event.get("name") == "aten::addmm" for event in events_of(path))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"wait": -1}, r"wait=-1\) must be at least 0"),
        ({"active": 0}, r"active=0\) must be at least 1"),
        ({"ranks": "first"}, r"ranks='first'\) must be 'all', or a list"),
        ({"ranks": []}, r"ranks=\[\]\) must be"),
    ],
)
def test_impossible_windows_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        PipelineProfiler(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"every_n_steps": 0}, "every_n_steps=0"), ({"max_entries": 0}, "max_entries=0"), ({"ranks": [-1]}, r"\[-1\]")],
)
def test_impossible_snapshots_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        MemorySnapshots(**options)


def test_memory_that_ran_out_is_known_by_what_an_error_came_of() -> None:
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    error = RuntimeError("stage 1 failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert ran_out_of_memory(error)
    assert not ran_out_of_memory(RuntimeError("out of memory"))


@pytest.mark.gpu
def test_snapshots_are_written_every_so_often_and_when_memory_runs_out(tmp_path: Path) -> None:
    class Hungry(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                torch.empty(1 << 50, device=self.device)
            return super().training_step(batch, batch_idx)

    run = L.Trainer(
        accelerator="gpu",
        devices=1,
        logger=False,
        callbacks=[MemorySnapshots(every_n_steps=2, dirpath=tmp_path)],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(torch.OutOfMemoryError):
        run.fit(Hungry(), loader())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank0000.000002.pickle",
        "rank0000.out_of_memory.pickle",
    ]


def test_the_flight_recorder_is_set_for_nccl_and_keeps_what_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", *earlier):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    record_nccl(tmp_path / "recorder", "cpu:gloo,cuda:nccl")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/recorder/rank_"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert (tmp_path / "recorder").is_dir()
    with pytest.raises(ConfigurationError, match=r"flight_recorder_dirpath='x'.*over gloo. Leave it out"):
        record_nccl("x", "gloo")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be made"):
        record_nccl(tmp_path / "file" / "folder", "nccl")
    record_nccl(None, "gloo")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name)
    for name in earlier:  # torch would take its name of now before what the user has set by an earlier one
        monkeypatch.setenv(name, "12")
    record_nccl(tmp_path / "recorder", "nccl")
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ and "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
