"""Write the program of one rank in the notation of the papers, where microbatches are implied."""

from __future__ import annotations

from lightning_pp.schedule.program.action import Action, ActionKind


class ChunkProgram:
    """The program of one rank that holds several stages, its *chunks*.

    ``write("F0 I1 W1")`` appends the next F of chunk 0, the next I of chunk 1, and the W of the oldest I of chunk 1
    that still waits for it; ``W`` without a chunk takes the oldest I of all. I and B of a chunk count together.
    Microbatches from ``num_microbatches`` on are counted but not written, so that a pattern made for many serves for
    few.
    """

    def __init__(self, stages: tuple[int, ...], num_microbatches: int) -> None:
        self.stages = stages
        self.num_microbatches = num_microbatches
        self.actions: list[Action] = []
        self.num_forwards = [0] * len(stages)
        self.num_backwards = [0] * len(stages)
        self.waiting: list[tuple[int, int]] = []
        """Chunk and microbatch of each I whose W is still to come, oldest first."""

    def write(self, pattern: str, times: int = 1) -> None:
        """Append the actions of ``pattern``, ``times`` times."""
        for _ in range(times):
            for token in pattern.split():
                self._write_action(ActionKind(token[0]), int(token[1:]) if token[1:] else None)

    def write_waiting(self) -> None:
        """Append all W that still wait, oldest first."""
        self.write("W", len(self.waiting))

    def _write_action(self, kind: ActionKind, chunk: int | None) -> None:
        if kind is ActionKind.W:
            index = next(i for i, (waiting, _) in enumerate(self.waiting) if chunk in (None, waiting))
            chunk, microbatch = self.waiting.pop(index)
        else:
            assert chunk is not None, "only W may leave its chunk open"
            counts = self.num_forwards if kind is ActionKind.F else self.num_backwards
            microbatch = counts[chunk]
            counts[chunk] += 1
            if kind is ActionKind.I:
                self.waiting.append((chunk, microbatch))
        if microbatch < self.num_microbatches:
            self.actions.append(Action(self.stages[chunk], kind, microbatch))
