"""DualPipeV: the V-shaped form of DeepSeek's DualPipe (github.com/deepseek-ai/DualPipe, "Cut-in-half").

DualPipe runs a forward and a backward of different microbatches side by side to hide expert-parallel transfers; here
the two of a pair run one after the other, which is also what a runtime without that overlap does.
"""

from __future__ import annotations

from lightning_pp.schedule.families.chunk_program import ChunkProgram
from lightning_pp.schedule.program.coded import CodedProgram
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import Family, ScheduleRequest, register
from lightning_pp.schedule.schedule import Schedule


def build_dualpipe_v(request: ScheduleRequest) -> Schedule:
    """The eight phases of the published order, made for at least 2p microbatches; fewer are a part of it."""
    p, m = request.num_ranks, request.num_microbatches
    placement = Placement.v_shaped(p)
    n = max(2 * p, m)
    return Schedule(
        "dualpipe_v",
        placement,
        m,
        tuple(_program(rank, p, n, placement, m) for rank in range(p)),
    )


def _program(rank: int, p: int, n: int, placement: Placement, m: int) -> CodedProgram:
    """The phases of one rank, for n microbatches of which m are written."""
    program = ChunkProgram(placement, rank, m)
    program.write("F0", 2 * (p - rank - 1))
    program.write("F0 F1", rank + 1)
    program.write("I1 W F1", p - rank - 1)
    program.write("F0 B1 F1 B0", n - 2 * p + rank + 1)
    program.write("B1 F1 B0", p - rank - 1)
    # In the second half of the cool-down the weight gradients wait, to fill the gaps of the last two phases.
    for index in range(2 * (rank + 1)):
        program.write(f"{'B' if index <= rank else 'I'}{1 - index % 2}")
    program.write("W I0", p - rank - 1)
    program.write_waiting()
    return program.program()


register(
    Family(
        "dualpipe_v",
        build_dualpipe_v,
        "two stages a rank in a V, forwards and backwards in pairs",
        default_stages_per_rank=2,
        has_fixed_stages=True,
    )
)
