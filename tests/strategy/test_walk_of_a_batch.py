"""The files between Lightning's call and the user's step, as docs/inside/architecture.md tells them."""

from __future__ import annotations

import traceback
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar

from pipelined_fit import fit
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor

import lightning_pp

PACKAGE = Path(lightning_pp.__file__).parent
LAYERS = ["strategy", "planning", "runtime", "split"]


class Walked(Blocks):
    """Notes the files of the package below the strategy, each time that its step is called by the executor."""

    seen: ClassVar[list[list[str]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        paths = [Path(frame.filename) for frame in traceback.extract_stack()]
        files = [path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)]
        if "runtime/executor.py" in files:
            walk = files[
                -1 - files[::-1].index("strategy/strategy.py") :
            ]  # optimizer_step is before, around Lightning's
            self.seen.append([file for file, _ in groupby(walk)])
        return super().training_step(batch, batch_idx)


def walks() -> list[list[str]]:
    Walked.seen.clear()
    fit(Walked())
    return Walked.seen


def test_a_batch_passes_few_files_and_climbs_back_once(pool: WorkerPool) -> None:
    for found in pool.run(walks, world_size=2):
        assert found
        for walk in found:
            layers = [LAYERS.index(file.partition("/")[0]) for file in walk]
            assert len(set(walk)) <= 8, walk
            assert sum(after < before for before, after in pairwise(layers)) <= 1, walk
