"""Write the program of one rank in the notation of the papers, where microbatches are implied."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import numpy as np

from lightning_pp.schedule.program.action import ActionKind
from lightning_pp.schedule.program.coded import INDEX_OF_KIND, KIND_OF_INDEX, CodedProgram, F, I, W
from lightning_pp.schedule.program.placement import Placement


class ChunkProgram:
    """The program of one rank that holds several stages, its *chunks*.

    ``write("F0 I1 W1")`` appends the next F of chunk 0, the next I of chunk 1, and the W of the oldest I of chunk 1
    that still waits for it; ``W`` without a chunk takes the oldest I of all. I and B of a chunk count together.
    Microbatches from ``num_microbatches`` on are counted but not written, so that a pattern made for many serves for
    few.
    """

    def __init__(self, placement: Placement, rank: int, num_microbatches: int) -> None:
        self.num_stages = placement.num_stages
        self.num_microbatches = num_microbatches
        stages = placement.stages_of_rank(rank)
        self.num_forwards = [0] * len(stages)
        self.num_backwards = [0] * len(stages)
        self.waiting: list[deque[tuple[int, int]]] = [deque() for _ in stages]
        """For each chunk, its I whose W is still to come, oldest first: its number among all I, and its microbatch."""
        self._first_code = [
            [(kind * self.num_stages + stage) * num_microbatches for stage in stages]
            for kind in range(len(KIND_OF_INDEX))
        ]
        self._codes: list[int] = []
        self._num_inputs = 0

    def write(self, pattern: str, times: int = 1) -> None:
        """Append the actions of ``pattern``, ``times`` times."""
        tokens = _tokens(pattern)
        codes, m, waiting = self._codes, self.num_microbatches, self.waiting
        for _ in range(times):
            for kind, chunk in tokens:
                if kind == W:
                    if chunk is None:  # that of the oldest I
                        chunk = min((inputs[0], chunk) for chunk, inputs in enumerate(waiting) if inputs)[1]
                    _, microbatch = waiting[chunk].popleft()
                else:
                    assert chunk is not None, "only W may leave its chunk open"
                    counts = self.num_forwards if kind == F else self.num_backwards
                    microbatch = counts[chunk]
                    counts[chunk] = microbatch + 1
                    if kind == I:
                        waiting[chunk].append((self._num_inputs, microbatch))
                        self._num_inputs += 1
                if microbatch < m:
                    codes.append(self._first_code[kind][chunk] + microbatch)

    def write_waiting(self) -> None:
        """Append all W that still wait, oldest first."""
        self.write("W", sum(map(len, self.waiting)))

    def program(self) -> CodedProgram:
        """What has been written."""
        return CodedProgram(np.array(self._codes, dtype=np.int64), self.num_stages, self.num_microbatches)


@lru_cache
def _tokens(pattern: str) -> tuple[tuple[int, int | None], ...]:
    """Kind and chunk of each word of ``pattern``."""
    return tuple(
        (INDEX_OF_KIND[ActionKind(token[0])], int(token[1:]) if token[1:] else None) for token in pattern.split()
    )
