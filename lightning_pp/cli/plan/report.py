"""What ``lightning-pp-plan`` prints: the stages, the memory of each rank, the schedules, and one of them drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from torch import Tensor

from lightning_pp.cli.plan import numbers
from lightning_pp.cli.plan.collectives import Collectives
from lightning_pp.cli.plan.costs import Costs
from lightning_pp.cli.plan.schedules import PlannedSchedule, ScheduleTable
from lightning_pp.cli.report import summarise_units
from lightning_pp.planning.model_cutter import ModelCutter
from lightning_pp.planning.plan_summary import CrossingSummary, CutSummary, StageSummary, UnitSummary, summarize_cut
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.tensor_parts import OnParts
from lightning_pp.split.cut.partition import inseparable_groups, why_inseparable
from lightning_pp.split.cut.wide_cuts import ADVICE
from lightning_pp.split.data.tree import tensors_of
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.telemetry.timeline.step import Timeline
from lightning_pp.telemetry.timeline.text import text_timeline

_LEAST_FOLDED = 3


@dataclass(frozen=True)
class Plan:
    """All that there is to tell.

    Attributes:
        cutter: The model.
        strategy: The pipeline as configured.
        num_devices: Devices that it is planned for.
        assumptions: What had to be assumed.
        costs: What the stages cost.
        limit_bytes: The most that a rank may hold; None for no limit.
        table: All schedules.
        shown: The one that is drawn and exported.
        configured: The one that the run would use, or begin with; None if it is not among them.
    """

    cutter: ModelCutter
    strategy: PipelineParallelStrategy
    num_devices: int
    assumptions: tuple[str, ...]
    costs: Costs
    limit_bytes: float | None
    table: ScheduleTable
    shown: PlannedSchedule
    configured: PlannedSchedule | None

    @property
    def timeline(self) -> Timeline:
        """The shown schedule, simulated."""
        return Timeline.simulated(self.shown.schedule, self.shown.cut.costs, self.costs.unit)

    @property
    def time_with_collectives(self) -> float:
        """Of a step in a row of steps of the shown schedule, with what data-parallel ranks gather and reduce.

        Without, where there are none or where times are relative.
        """
        links, sizes = self.costs.links, self.cutter.sizes
        if links is None or sizes.data_parallel == 1:
            return self.shown.time_in_a_row
        cut = self.shown.cut
        collectives = Collectives.of(cut.split, self.cutter.memory_model, sizes, links)
        return collectives.time_in_a_row(self.shown.schedule, cut.costs, self.shown.time_in_a_row)


def print_plan(console: Console, plan: Plan) -> None:
    """Prints everything."""
    shown = plan.shown
    print_stages(console, plan.cutter, shown.cut.summary, f"cut for {shown.name}")
    if (on_parts := shown.cut.split.on_parts) is not None:
        console.print(Text(tensor_text(plan, on_parts)), soft_wrap=True)
        console.print()
    if shown.cut.about_head:
        console.print(Text(shown.cut.about_head), soft_wrap=True)
        console.print()
    console.print(memory_table(plan))
    console.print()
    console.print(schedule_table(plan))
    if shown.without is not None:
        console.print(Text(whole_batch_text(plan, shown)), soft_wrap=True)
    if plan.time_with_collectives > plan.shown.time_in_a_row:
        console.print(Text(collectives_text(plan)), soft_wrap=True)
    for unusable in plan.table.unusable:
        console.print(
            Text(f"not possible: {unusable.name}, {unusable.stages_per_rank} a rank: {unusable.reason}", "dim")
        )
    console.print()
    width = max(60, console.width)
    console.print(Text.from_ansi(text_timeline(plan.timeline, width=width)), soft_wrap=True)
    for assumption in plan.assumptions:
        console.print(Text(f"assumed: {assumption}", "dim"), soft_wrap=True)


def collectives_text(plan: Plan) -> str:
    """What gathers and reductions of data-parallel ranks cost under the shown schedule, a sentence."""
    sizes, mode = plan.cutter.sizes, plan.cutter.options.sharding.mode
    return (
        f"With the gathers and reductions of {sizes.data_parallel} data-parallel ranks (sharding={mode}), a step in a "
        f"row of {plan.shown.name} takes {numbers.milliseconds(plan.time_with_collectives)} {plan.costs.unit} instead "
        f"of {numbers.milliseconds(plan.shown.time_in_a_row)}."
    )


def tensor_text(plan: Plan, on_parts: OnParts) -> str:
    """Which ranks share matrices, and what stays whole."""
    links, size = plan.costs.links, on_parts.size
    where = "" if links is None or links.between_neighbours(size) == links.inside else ", on several nodes"
    return (
        f"tensor_parallel_size={size}: neighbouring global ranks share the matrices of a stage (0 to {size - 1}, "
        f"{size} to {2 * size - 1}, ...{where}), since the tensor axis is the innermost. Memory and times are those of "
        f"one of them. {on_parts.about}"
    )


def print_check(console: Console, cutter: ModelCutter, split: SplitModel, about: str) -> None:
    """Prints where a module can be cut, and a cut of it."""
    summary = summarize_cut(split)
    groups = inseparable_groups(split.record)
    print_stages(console, cutter, summary, f"can be cut into {split.placement.num_stages} stages")
    console.print(Text(f"recorded: {about}"), soft_wrap=True)
    console.print(
        f"units: {summary.num_called_units}; possible cuts: {len(groups) - 1}, before each unit but the first"
        f"{' and those named below' if len(groups) < summary.num_called_units else ''}; at most {len(groups)} stages",
        soft_wrap=True,
    )
    for group in groups:
        if len(group) > 1:
            why = why_inseparable(split.record, group)
            console.print(Text(f"must share a stage: {summarise_units(group)}, because {why}"), soft_wrap=True)
    console.print(
        f"between stages: {numbers.size(summary.sent_bytes)} a microbatch, forward and back together", soft_wrap=True
    )


def print_stages(console: Console, cutter: ModelCutter, summary: CutSummary, verdict: str) -> None:
    """Prints the stages as a tree."""
    shapes = ", ".join(map(_shape, tensors_of(cutter.microbatch.data)[:3]))
    batch = f"{cutter.batch_size} samples" if cutter.batch_size is not None else "its"
    console.print()
    console.print(
        Text.assemble(
            (type(cutter.module).__name__, "bold"),
            f": {verdict}. {numbers.parameters(summary.num_parameters)}, {summary.num_called_units} units; a batch of "
            f"{batch} in {cutter.num_microbatches} microbatch{'es' if cutter.num_microbatches > 1 else ''}, of which "
            f"the first was recorded: {shapes}",
        )
    )
    for stage in summary.stages:
        console.print(stage_tree(stage, [c for c in summary.crossings if c.source == stage.stage]))
    if summary.refinement is not None:
        console.print(Text(str(summary.refinement)), soft_wrap=True)
    for cut in summary.wide:
        console.print(Text(f"wide: {cut}", "yellow"), soft_wrap=True)
    if summary.wide:
        console.print(Text(ADVICE), soft_wrap=True)
    console.print()


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def stage_tree(stage: StageSummary, crossings: Sequence[CrossingSummary]) -> Tree:
    """A stage, its units, and what leaves it."""
    tree = Tree(
        Text.assemble(
            (f"stage {stage.stage}", "bold"),
            f" on rank {stage.rank}: {numbers.parameters(stage.num_parameters)} "
            f"({numbers.size(stage.parameter_bytes)}), {numbers.flops(stage.flops)} forward",
        ),
        guide_style="dim",
    )
    rows = list(_unit_rows(stage.units))
    if stage.flops_after:
        rows.append(("after the last unit", "", numbers.flops(stage.flops_after), ""))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for name, size, work, remarks in rows:
        line = f"{name:<{widths[0]}}  {size:>{widths[1]}}  {work:>{widths[2]}}"
        tree.add(Text.assemble(line, (f"  {remarks}" if remarks else "", "dim")))
    if stage.outside:
        tree.add(Text(f"parameters outside units: {', '.join(stage.outside)}"))
    if stage.shared:
        tree.add(Text(f"shared with other stages: {', '.join(stage.shared)}"))
    for crossing in crossings:
        tree.add(_crossing_text(crossing))
    return tree


def _unit_rows(units: Sequence[UnitSummary]) -> Iterator[tuple[str, str, str, str]]:
    """Name, parameters, FLOPs, and class with remarks of each unit; equal ones that follow each other in one row."""

    def alike(unit: UnitSummary) -> tuple[object, ...]:
        return (unit.class_name, unit.num_parameters, unit.flops, unit.flops_before, unit.num_calls)

    for _, group in groupby(units, key=alike):
        members = list(group)
        folded = [members] if len(members) >= _LEAST_FOLDED else [[member] for member in members]
        for fold in folded:
            first, each = fold[0], " each" if len(fold) > 1 else ""
            remarks = [first.class_name]
            if first.flops_before:
                remarks.append(f"{numbers.flops(first.flops_before)} in the code before it")
            if first.num_calls != 1:
                remarks.append("not called" if not first.num_calls else f"{first.num_calls} calls")
            yield (
                summarise_units([unit.name for unit in fold]) + (f" ({len(fold)} units)" if each else ""),
                f"{numbers.parameters(first.num_parameters)}{each}",
                f"{numbers.flops(first.flops)}{each}",
                ", ".join(remarks),
            )


def _crossing_text(crossing: CrossingSummary) -> Text:
    back = f", {numbers.size(crossing.gradient_bytes)} back" if crossing.gradient_bytes else ", no gradient"
    return Text.assemble(
        (f"→ stage {crossing.target}", "cyan"),
        f": {crossing.value} {list(crossing.shape)} {crossing.dtype}, ",
        f"{numbers.size(crossing.forward_bytes)}{back}{'' if crossing.is_sent else ' (same rank, not sent)'}",
    )


def memory_table(plan: Plan) -> Table:
    """What each rank holds under the shown schedule."""
    limit = f", of {numbers.gib(plan.limit_bytes)} GiB" if plan.limit_bytes is not None else ""
    table = Table(title=f"Estimated memory of each rank under {plan.shown.name}, GiB{limit}", title_justify="left")
    headings = ("parameters", "gathered", "gradients", "optimizer", "activations", "buffers", "peak")
    offloads = any(rank.host for rank in plan.shown.memory)
    for heading in ("rank", "stages", *headings, *(("on host",) if offloads else ())):
        table.add_column(heading, justify="right")
    placement = plan.shown.schedule.placement
    for rank in plan.shown.memory:
        parts = (rank.parameters, rank.gathered, rank.gradients, rank.optimizer_state, rank.activations, rank.buffers)
        stages = ", ".join(map(str, placement.stages_of_rank(rank.rank)))
        table.add_row(
            str(rank.rank), stages, *map(numbers.gib, (*parts, rank.peak, *((rank.host,) if offloads else ())))
        )
    return table


def whole_batch_text(plan: Plan, planned: PlannedSchedule) -> str:
    """The price of ``whole_batch_loss`` under one schedule, in words."""
    before = planned.without
    assert before is not None, "asked for only with whole_batch_loss"
    longer = planned.time_in_a_row / before.time_in_a_row - 1
    return (
        "\nwhole_batch_loss=True: all forwards of a batch come before its backwards, so all "
        f"{plan.cutter.num_microbatches} microbatches are held at once. With {planned.schedule.name} a step in a row "
        f"takes {numbers.milliseconds(planned.time_in_a_row)} {plan.costs.unit} with it and "
        f"{numbers.milliseconds(before.time_in_a_row)} without ({longer:+.1%}). The bubble is "
        f"{planned.bubble_fraction:.1%} with it and {before.bubble_fraction:.1%} without. The rank with most "
        f"activations holds {numbers.gib(planned.most_activations)} GiB of them with it and "
        f"{numbers.gib(before.most_activations)} GiB without."
    )


def schedule_table(plan: Plan) -> Table:
    """All schedules, the best and the configured one marked."""
    unit = plan.costs.unit
    best = plan.table.best
    table = Table(
        title=f"Schedules; times {plan.costs.about}",
        caption=(
            "step: one step alone. In a row: one of many steps, each rank starting the next when it is done (the "
            "bubble is for this). Microbatches: the most of a rank at a time, from F to the end of their backward; on "
            "one of two stages one counts half. Sent: between ranks for a microbatch, both ways."
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("schedule", no_wrap=True)
    for heading in ("stages", f"step {unit}", f"in a row {unit}", "bubble", "microbatches", "GiB by rank", "sent"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for planned in plan.table.usable:
        placement = planned.schedule.placement
        marks = []
        if planned is best:
            marks.append("best")
        if planned is plan.configured:
            marks.append("configured")
        if not planned.fits:
            marks.append("over the limit")
        name = planned.schedule.name if planned.is_searched else planned.name
        table.add_row(
            name,
            f"{placement.num_stages}{' V' if placement.kind == 'V' else ''}",
            numbers.milliseconds(planned.step_time),
            numbers.milliseconds(planned.time_in_a_row),
            f"{planned.bubble_fraction:.1%}",
            numbers.by_rank([f"{peak:.3g}" for peak in planned.peak_microbatches]),
            numbers.by_rank([numbers.gib(rank.peak) for rank in planned.memory]),
            numbers.size(planned.cut.summary.sent_bytes),
            ", ".join(marks),
            style="bold" if planned is best else "dim" if not planned.fits else "",
        )
    return table
