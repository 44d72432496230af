"""A save that is killed leaves the checkpoint before it, and nothing that could be taken for a checkpoint."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import fork_context
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.checkpoint.reading.open import open_checkpoint
from lightning_pp.checkpoint.storage.folder import staging_path
from lightning_pp.checkpoint.writing.background import BackgroundSaver
from lightning_pp.checkpoint.writing.sharded import make_stager, prepare_save
from lightning_pp.errors import CheckpointError

NUM_RANKS = 2
WIDTH = 600
LAYERS = 4
SAVES_TO_MEASURE = 3
FOLLOWS_WITHIN_S = 60.0
"""For ranks whose peer was killed; they see the closed connection, and the rest is a loaded machine."""


def path_of(folder: Path, version: int, mode: str) -> Path:
    return folder / ("model.ckpt" if mode == "replace" else f"version={version}.ckpt")


def keep_saving(rank: int, port: int, folder: Path, mode: str, told: Connection) -> None:
    """Saves versions 0, 1, ... without end; every value in a version is its number. Rank 0 tells when one begins."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("pipeline", "data_parallel"))
    module = nn.Module()
    whole = {f"layers.{layer}.weight": layer * NUM_RANKS // LAYERS for layer in range(LAYERS)}
    module.layers = nn.ModuleDict(
        {
            str(layer): nn.Linear(WIDTH, WIDTH, bias=False)
            for layer in range(LAYERS)
            if layer * NUM_RANKS // LAYERS == rank
        }
    )
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    shapes = dict.fromkeys(whole, torch.Size([WIDTH, WIDTH]))
    catalog = ParameterCatalog(
        tuple(whole), {name: (owner,) for name, owner in whole.items()}, shapes, {}, ((tuple(whole),),)
    )
    part = RankPart(module, catalog, mesh, [optimizer])
    background = BackgroundSaver(dist.new_group(backend="gloo")) if mode == "background" else None
    stager = make_stager() if background is not None else None
    for version in range(10_000):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(version)
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, version)
        if background is not None:
            background.wait()
        if rank == 0:
            told.send((version, time.monotonic()))
        checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [], "version": version}
        save = prepare_save(path_of(folder, version, mode), part, checkpoint, stager)
        if background is not None:
            background.save(save.write)
        else:
            save.write()


def run_until_killed(folder: Path, mode: str, moment: float, victims: list[int]) -> tuple[int, list[int | None]]:
    """Starts the ranks, measures some saves, kills ``victims`` that far into the next one.

    Args:
        folder: Where they save.
        mode: ``"replace"``: every version in the place of the one before; ``"new"``: each in a place of its own;
            ``"background"``: as that, by a thread.
        moment: As a part of the duration of a save.
        victims: Ranks to kill.

    Returns:
        The version whose save was interrupted, and the exit codes.
    """
    context = fork_context()
    receiver, sender = context.Pipe(duplex=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[BaseProcess] = [
        context.Process(target=keep_saving, args=(rank, store.port, folder, mode, sender)) for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    sender.close()
    try:
        begins = []
        while len(begins) <= SAVES_TO_MEASURE:
            assert receiver.poll(120), "no save began"
            begins.append(receiver.recv()[1])
        durations = sorted(after - before for before, after in pairwise(begins[1:]))
        time.sleep(max(0.0, begins[-1] + moment * durations[len(durations) // 2] - time.monotonic()))
        for victim in victims:
            os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        for process in ranks:
            process.join(FOLLOWS_WITHIN_S)
        last = SAVES_TO_MEASURE
        while receiver.poll(0):
            try:
                last = receiver.recv()[0]
            except EOFError:
                break
        return last, [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def version_at(path: Path) -> int:
    """The version of a whole checkpoint, after reading every tensor in it."""
    opened = open_checkpoint(path, weights_only=True)
    version = opened.content["version"]
    for value in opened.content["state_dict"].values():
        assert value.shape == (WIDTH, WIDTH) and bool((value == version).all())
    kept = opened.optimizer_content(0)  # type: ignore[attr-defined]
    assert len(kept) == LAYERS
    assert all(bool((state["momentum_buffer"] == version).all()) for state in kept.values())
    return int(version)


def check_a_killed_save(folder: Path, number: int, count: int) -> str:
    """Kills save ``number`` of ``count``, whose moments are spread over a save's duration; tells what was found."""
    generator = random.Random(1000 + number)
    mode = ("replace", "new", "background")[number % 3]
    moment = (number + generator.random()) / count
    victims = [[0], [1], [0, 1]][generator.randrange(3)]
    last, exit_codes = run_until_killed(folder, mode, moment, victims)
    for rank, code in enumerate(exit_codes):
        assert code == (-signal.SIGKILL if rank in victims else 1), f"rank {rank} ended with {code}"
    if mode == "replace":
        found = version_at(path_of(folder, last, mode))
        assert found in (last - 1, last)
        finished = found == last
    else:
        assert version_at(path_of(folder, last - 1, mode)) == last - 1
        finished = path_of(folder, last, mode).exists()
        if finished:
            assert version_at(path_of(folder, last, mode)) == last
        else:
            with pytest.raises(CheckpointError, match="does not exist"):
                open_checkpoint(path_of(folder, last, mode))
    unfinished = staging_path(path_of(folder, last, mode))
    if unfinished.exists() and not finished:
        try:
            told = f"version {version_at(unfinished)}"
        except CheckpointError as error:
            told = str(error)
        # it is whole if the ranks were killed between its last byte and its renaming
        assert re.search(f"is not a complete checkpoint|cannot be read|is missing|truncated|^version {last}$", told)
    return f"{mode} {moment:.2f} {victims} {'finished' if finished else 'interrupted'} partial={unfinished.exists()}"


@pytest.mark.parametrize(
    ("number", "count"),
    [*((n, 3) for n in range(3)), *(pytest.param(n, 20, marks=pytest.mark.nightly) for n in range(20))],
)
def test_killed_save(tmp_path: Path, number: int, count: int) -> None:
    print(check_a_killed_save(tmp_path, number, count))
