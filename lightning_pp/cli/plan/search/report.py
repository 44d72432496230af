"""The output of a search: the number of plans, a table of the best, and the words that select each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_pp.cli.plan import numbers
from lightning_pp.cli.plan.search.plans import FoundPlan, SearchResult
from lightning_pp.cli.plan.search.space import Layout, Space, words_of
from lightning_pp.cli.problems import UserError

_GIB = float(1 << 30)
_NUM_REASONS = 3


@dataclass
class Search:
    """Everything that is printed of a search.

    Attributes:
        config: What is configured.
        batch_size_key: Where it has the samples of one replica's batch; None if nowhere.
        space: The plans.
        result: What came out.
        costs_about: Where the times come from.
        limit_bytes: The most that a rank may hold; None for no limit.
        module: The class of the module.
        seconds: How long it took.
    """

    config: DictConfig
    batch_size_key: str | None
    space: Space
    result: SearchResult
    costs_about: str
    limit_bytes: float | None
    module: str
    seconds: float = 0.0

    def words(self, plan: FoundPlan) -> list[str]:
        """What to write on the command line for ``plan``."""
        return words_of(plan.layout, plan.sharding, self.config, self.batch_size_key)

    @property
    def devices(self) -> str:
        """``8 devices of 80 GiB``."""
        number, limit = self.space.num_devices, self.limit_bytes
        memory = "" if limit is None else f" of {limit / _GIB:g} GiB"
        return f"{number} device{'s' if number > 1 else ''}{memory}"


def print_search(console: Console, search: Search) -> None:
    """Prints everything."""
    result = search.result
    console.print()
    console.print(Text.assemble((search.module, "bold"), f" on {search.devices}: {_summary(search)}"), soft_wrap=True)
    for reason, number in _reasons(result):
        console.print(Text(f"not possible, {number} of them: {reason}", "dim"), soft_wrap=True)
    console.print()
    console.print(_table(search))
    console.print()
    console.print(
        "To use a plan, write its words after the command, lightning-pp or lightning-pp-plan without --search:"
    )
    for place, plan in enumerate(result.best, 1):
        console.print(Text(f"{place}: {' '.join(search.words(plan))}"), soft_wrap=True)


def nothing_fits(search: Search) -> UserError:
    """Why there is no plan, and which would need least."""
    result = search.result
    least = result.least
    if least is None:
        reasons = "\n".join(f"  {number} of them: {reason}" for reason, number in _reasons(result))
        return UserError(f"none of the {result.num_plans} plans for {search.devices} is possible:\n{reasons}")
    fullest = max(least.planned.memory, key=lambda rank: rank.peak)
    state = fullest.peak - fullest.activations - fullest.buffers
    return UserError(
        f"none of the {result.num_plans} plans for {search.devices} fits. The smallest plan needs "
        f"{fullest.peak / _GIB:.3g} GiB on rank {fullest.rank}, of which {state / _GIB:.3g} GiB are parameters, "
        f"gradients and optimizer state: {' '.join(search.words(least))}. Use more devices, strategy.cpu_offload=true, "
        "trainer.precision=bf16-true, or fewer samples in a step"
    )


def _summary(search: Search) -> str:
    result = search.result
    parts = [f"{result.num_too_large} do not fit"] if search.limit_bytes is not None else []
    if result.impossible:
        parts.append(f"{len(result.impossible)} are not possible")
    parts.append(f"{result.num_slower} cannot be among the best, by their work alone")
    parts.append(f"{result.num_cut} were cut and simulated")
    samples = search.space.num_samples
    return (
        f"{result.num_plans} plans of {samples} sample{'s' if samples > 1 else ''} a step were compared in "
        f"{search.seconds:.0f} s; {', '.join(parts)}."
    )


def _reasons(result: SearchResult) -> list[tuple[str, int]]:
    """The most frequent reasons why plans are not possible, and how often."""
    return Counter(reason for _, reason in result.impossible).most_common(_NUM_REASONS)


def _table(search: Search) -> Table:
    table = Table(
        title=f"The best plans; times {search.costs_about}",
        caption=(
            "in a row: a step in a row of steps; with gathers: also with what data-parallel ranks gather and reduce, "
            "under the fastest sharding of each. Bubble: without gathers. Cuts are between whole blocks. Training cuts "
            "inside blocks where a step gets 2 % shorter. lightning-pp-plan with a plan's words shows that gain."
        ),
        title_justify="left",
        caption_justify="left",
    )
    for heading in (
        "",
        "in a row\nms",
        "with\ngathers ms",
        "samples/s",
        "GiB",
        "bubble",
        "ranks x replicas\nx tensor ranks",
    ):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("schedule,\nstages a rank", no_wrap=True, overflow="fold")
    for heading in ("microbatches\nx samples", "run again", "sharding,\ncopies"):
        table.add_column(heading, overflow="fold")
    for place, plan in enumerate(search.result.best, 1):
        layout, planned = plan.layout, plan.planned
        table.add_row(
            str(place),
            numbers.milliseconds(planned.time_in_a_row),
            numbers.milliseconds(plan.time_in_a_row),
            f"{1e3 * search.space.num_samples / plan.time_in_a_row:.4g}",
            numbers.gib(planned.peak_bytes),
            f"{planned.bubble_fraction:.1%}",
            f"{layout.num_ranks} x {layout.num_replicas} x {layout.num_tensor_ranks}",
            _schedule(layout),
            f"{layout.num_microbatches} x {layout.microbatch_size}",
            _checkpointing(layout),
            _sharding(plan),
            style="bold" if place == 1 else "",
        )
    return table


def _schedule(layout: Layout) -> str:
    return layout.schedule + (f", {layout.stages_per_rank}" if layout.stages_per_rank > 1 else "")


def _checkpointing(layout: Layout) -> str:
    value = layout.activation_checkpointing
    return "nothing" if value is False else "blocks" if value is True else "as configured"


def _sharding(plan: FoundPlan) -> str:
    if plan.layout.num_replicas == 1:
        return "-"
    copies = plan.sharding.replicate_size
    return plan.sharding.mode + (f", {copies}" if copies > 1 else "")
