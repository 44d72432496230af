"""Figures of the schedule layer: published bubbles, distance from the optimum, search time.

Usage, from the root of the repository:

    python benchmarks/planning/schedules.py published       # hand-made and searched schedules beside the papers'
    python benchmarks/planning/schedules.py optimality      # auto beside the optima of random small problems
    python benchmarks/planning/schedules.py ablation        # auto without each of its parts
    python benchmarks/planning/schedules.py time            # CPU seconds of the search on one core
    python benchmarks/planning/schedules.py scale           # every family at 1,024 ranks and 4,096 microbatches
    python benchmarks/planning/schedules.py whole_batch     # what whole_batch_loss costs every schedule
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_pp.schedule import Schedule, StageCosts, available_schedules, build_schedule
from lightning_pp.schedule.registry import schedule_family
from lightning_pp.schedule.search import auto

PROFILES = Path(__file__).parents[2] / "tests" / "schedule" / "published_profiles.json"
OPTIMA = PROFILES.with_name("optima.json")
SEQUENCE_LENGTH = 1024


def held_after_input(architecture: dict[str, int]) -> float:
    """What a layer holds after I, as a part of what it holds after F: 32h of 34h + 5as (arXiv:2401.10241)."""
    hidden = architecture["hidden"]
    return 32 * hidden / (34 * hidden + 5 * architecture["heads"] * SEQUENCE_LENGTH)


def costs_of(row: dict[str, Any], factor: float = 1.0, held: float = 1.0) -> StageCosts:
    """The measured costs of one row, per stage."""
    return StageCosts(
        forward=factor * row["forward_ms"],
        backward_input=factor * row["backward_input_ms"],
        backward_weight=factor * row["backward_weight_ms"],
        p2p=row["p2p_ms"],
        held_after_input=held,
    )


def show(label: str, published: float, schedule: Schedule, costs: StageCosts, seconds: float) -> None:
    """One line: our bubble beside the published one."""
    simulation = schedule.simulate(costs)
    bubble = simulation.bubble_fraction
    verdict = "at or below" if round(bubble, 4) <= published else "ABOVE"
    print(
        f"{label:<34} {bubble:.5f}  published {published:.4f}  {verdict:<11} "
        f"peak {max(simulation.peak_memory):6.2f}  {seconds:5.1f} s  {schedule.name}",
        flush=True,
    )


def published_rows() -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Label, schedule, published bubble and request of each row."""
    profiles = json.loads(PROFILES.read_text())
    for row in profiles["one_chunk_per_rank"]:
        p, m = row["stages"], row["microbatches"]
        costs = costs_of(row, held=held_after_input(profiles["architectures"][row["model"]]))
        for key, limit in (("zb_1p", p), ("zb_2p", 2 * p)):
            request = {"num_ranks": p, "num_microbatches": m, "costs": costs, "memory_limit": limit}
            yield f"{key} {row['model']} p={p} m={m}", "auto", row["bubble"][key], request
    for row in profiles["two_chunks_per_rank"]["rows"]:
        p, m = row["ranks"], row["microbatches"]
        requests = [("auto", "zb_v", row["bubble"]["zb_v"], 2 * p)]
        if (p, m) == (32, 96):
            requests += [("v_half", "v_half", 0.181, 2 * ((p + 2) // 2)), ("v_min", "v_min", 0.311, 2 * ((p + 4) // 3))]
        for name, label, bubble, limit in requests:
            request = {"num_ranks": p, "num_microbatches": m, "stages_per_rank": 2, "costs": costs_of(row)}
            yield f"{label} p={p} m={m}", name, bubble, {**request, "memory_limit": limit}


def published(most_microbatches: int) -> None:
    """Our bubbles beside the published ones, same definition, same memory."""
    for label, name, bubble, request in published_rows():
        if request["num_microbatches"] > most_microbatches:
            continue
        begin = time.process_time()
        schedule = build_schedule(name, **request)
        show(label, bubble, schedule, request["costs"], time.process_time() - begin)


def uneven_requests() -> Iterator[dict[str, Any]]:
    """Random problems of 2 to 8 ranks, whose stages are of any length, alike with a long last one, or nearly alike."""
    for number, sizes, microbatches in ((48, range(2, 5), range(4, 9)), (16, (4, 8), (16, 32))):
        draw = random.Random(7)
        for index in range(number):
            p, m, v = draw.choice(sizes), draw.choice(microbatches), 1 + index % 2
            means, low, high, head = (
                ((10.0, 10.0, 10.0), 0.5, 2.0, 1.0),
                ((10.0, 10.5, 8.0), 0.95, 1.05, 1.4),
                ((10.0, 10.5, 8.0), 0.8, 1.2, 1.0),
            )[index // 2 % 3]
            times = [[round(mean * draw.uniform(low, high), 2) for _ in range(p * v)] for mean in means]
            for kind in times:
                kind[-1] *= head
            limit = draw.choice([None, p * v, 1.5 * p * v, 2 * p * v])
            costs = StageCosts(times[0], times[1], times[2], p2p=0.5, held_after_input=0.6)
            yield {"num_ranks": p, "num_microbatches": m, "stages_per_rank": v, "costs": costs, "memory_limit": limit}


def ablation() -> None:
    """What each part of the search is for: published rows, bubbles and CPU seconds without it."""
    parts: dict[str, AbstractContextManager[Any]] = {
        "nothing": nullcontext(),
        "moves uphill (annealing)": patch.object(auto, "_TEMPERATURES", (0.0,)),
        "all moves": patch.object(auto, "_MIN_CLIMBING_STEPS", math.inf),
        "justification": patch.object(auto, "justify", lambda problem, orders, *_, **__: orders),
        "moves and justification": patch.object(auto, "_improved", lambda *_: []),
        "greedy constructions": patch.object(auto, "_greedy_candidates", lambda *_: iter(())),
    }
    rows = [(bubble, request) for _, name, bubble, request in published_rows() if name == "auto"]
    rows += [(math.inf, request) for request in uneven_requests()]
    full: list[float] = []
    print("| without | at or below | published: mean | worst | uneven: mean | worst | above .002 | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for part, switched_off in parts.items():
        begin = time.process_time()
        with switched_off:
            found = [
                build_schedule("auto", **request).simulate(request["costs"]).bubble_fraction for _, request in rows
            ]
        seconds = time.process_time() - begin
        full = full or [float(bubble) for bubble in found]
        below = [round(bubble, 4) <= most for bubble, (most, _) in zip(found, rows, strict=True) if most < math.inf]
        worse = [float(bubble) - other for bubble, other in zip(found, full, strict=True)]
        groups = worse[: len(below)], worse[len(below) :]
        figures = " | ".join(f"{statistics.mean(group):.4f} | {max(group):.4f}" for group in groups)
        num_worse = sum(change > 0.002 for change in worse)
        print(f"| {part} | {sum(below)} of {len(below)} | {figures} | {num_worse} | {seconds:.0f} |", flush=True)


def optimality() -> None:
    """``auto`` against what CP-SAT found for random small problems."""
    gaps = []
    for index, problem in enumerate(json.loads(OPTIMA.read_text())["problems"]):
        costs = StageCosts(**problem["costs"])
        sizes = {name: problem[name] for name in ("num_ranks", "num_microbatches", "stages_per_rank", "memory_limit")}
        schedule = build_schedule("auto", costs=costs, **sizes)
        gap = schedule.simulate(costs).makespan / problem["makespan"] - 1
        gaps.append(gap)
        proven = "" if problem["is_proven"] else "(not proven)"
        print(f"{index:3} {sizes} {100 * gap:6.3f} % {proven} {schedule.name}", flush=True)
    print(f"{len(gaps)} problems: mean {100 * sum(gaps) / len(gaps):.3f} %, worst {100 * max(gaps):.3f} %")


def search_time() -> None:
    """CPU seconds of ``auto`` at the two large sizes, one and two stages a rank."""
    for num_ranks, num_microbatches in ((32, 256), (64, 512)):
        for stages_per_rank in (1, 2):
            costs = StageCosts(10.4, 10.2, 7.7, p2p=0.4)
            begin = time.process_time()
            schedule = build_schedule(
                "auto",
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                stages_per_rank=stages_per_rank,
                costs=costs,
                memory_limit=2 * num_ranks,
            )
            seconds = time.process_time() - begin
            bubble = schedule.simulate(costs).bubble_fraction
            print(
                f"p={num_ranks} m={num_microbatches} stages_per_rank={stages_per_rank}: {seconds:.1f} s, "
                f"bubble {bubble:.4f}, {schedule.name}",
                flush=True,
            )


def scale(num_ranks: int, num_microbatches: int, names: list[str]) -> None:
    """CPU seconds in which a plan builds, checks and simulates each hand-made family; each in a process of its own."""
    print(f"{num_ranks} ranks, {num_microbatches} microbatches: CPU seconds, GiB of the process")
    print("| family | actions | build | check | simulate | together | memory | bubble |")
    print("|---|---|---|---|---|---|---|---|")
    processes = multiprocessing.get_context("spawn")
    for name in names or [name for name in available_schedules() if not schedule_family(name).is_search]:
        process = processes.Process(target=_print_scale, args=(name, num_ranks, num_microbatches))
        process.start()
        process.join()


def _print_scale(name: str, num_ranks: int, num_microbatches: int) -> None:
    costs = StageCosts(10.4, 10.2, 7.7, p2p=0.4)
    times = [time.process_time()]
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs)
    times.append(time.process_time())
    schedule.validate()
    times.append(time.process_time())
    simulation = schedule.simulate(costs)
    times.append(time.process_time())
    build, check, simulate = (end - begin for begin, end in pairwise(times))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"| `{name}` | {sum(map(len, schedule.programs)):,} | {build:.1f} | {check:.1f} | {simulate:.1f} | "
        f"{times[-1] - times[0]:.1f} | {memory:.1f} | {simulation.bubble_fraction:.4f} |",
        flush=True,
    )


def whole_batch() -> None:
    """Every schedule with and without ``whole_batch_loss``: 6.2B on 8 ranks, one stage a rank and two half as long."""
    profiles = json.loads(PROFILES.read_text())["one_chunk_per_rank"]
    row = next(row for row in profiles if row["model"] == "6.2B" and row["microbatches"] == 32)
    print(f"{'':<18} v   step, ms: with  without   bubble: with without   held: with without")
    for v in (1, 2):
        costs = costs_of(row, 1 / v)
        for name in available_schedules():
            family = schedule_family(name)
            if not family.allows(v) or family.default_stages_per_rank > v:
                continue
            sizes = {"num_ranks": row["stages"], "num_microbatches": row["microbatches"], "stages_per_rank": v}
            if name == "auto":  # without a limit it would hold as many either way
                free = build_schedule(name, costs=costs, memory_limit=2 * v * row["stages"], **sizes)
            else:
                free = build_schedule(name, costs=costs, **sizes)
            whole = build_schedule(name, costs=costs, whole_batch_loss=True, **sizes)
            one, other = whole.simulate(costs), free.simulate(costs)
            print(
                f"{name:<18} {v} {max(one.span_ms):15.1f} {max(other.span_ms):8.1f} {one.bubble_fraction:14.4f} "
                f"{other.bubble_fraction:7.4f} {max(one.peak_memory) / v:12.1f} {max(other.peak_memory) / v:7.1f}",
                flush=True,
            )


def main() -> None:
    """Read the command line and run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("published", help="compare with the papers")
    command.add_argument("--most-microbatches", type=int, default=10**9, help="leave out larger rows")
    commands.add_parser("optimality", help="compare with what CP-SAT found")
    commands.add_parser("ablation", help="leave out the parts of the search in turn")
    commands.add_parser("time", help="measure the search")
    command = commands.add_parser("scale", help="measure planning for many ranks")
    command.add_argument("names", nargs="*", help="families; all hand-made ones by default")
    command.add_argument("--ranks", type=int, default=1024)
    command.add_argument("--microbatches", type=int, default=4096)
    commands.add_parser("whole_batch", help="the price of whole_batch_loss")
    arguments = parser.parse_args()
    if arguments.command == "published":
        published(arguments.most_microbatches)
    elif arguments.command == "optimality":
        optimality()
    elif arguments.command == "ablation":
        ablation()
    elif arguments.command == "scale":
        scale(arguments.ranks, arguments.microbatches, arguments.names)
    elif arguments.command == "whole_batch":
        whole_batch()
    else:
        search_time()


if __name__ == "__main__":
    main()
