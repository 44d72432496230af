"""The strategy's ``costs=``: costs of stages, or a file of them."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import StageCosts
from lightning_pp.schedule.simulation.costs_file import GIB, read_costs_file

ARE_ALONE = "are_alone"
"""In ``measured_on`` of a file: the costs are of single units that ran alone, as :attr:`GivenCosts.are_alone`."""


@dataclass(frozen=True)
class GivenCosts:
    """Costs that the user gives.

    Attributes:
        stages: The costs.
        hold_gib: Whether their ``held_*`` are GiB; otherwise the bytes of the dry run count.
        origin: Where they come from, for messages.
        units: The units of each stage that they were measured on, where a file says it.
        ranks: The rank of each of these stages, likewise.
        are_alone: Whether they are of single units that ran alone, which says nothing of messages.
    """

    stages: StageCosts
    hold_gib: bool = False
    origin: str = "the given costs"
    units: list[list[str]] | None = None
    ranks: list[int] | None = None
    are_alone: bool = False

    def check_num_stages(self, num_ranks: int, num_stages: int | None) -> None:
        """Raises :class:`ConfigurationError` unless they can be for a pipeline.

        Args:
            num_ranks: Ranks of the pipeline.
            num_stages: Its stages; None: any multiple of the ranks.
        """
        number = self.stages.num_stages
        if number is None or self.units is not None:
            return  # one number for all, or known by unit, so that other stages can be made of them
        if number % num_ranks if num_stages is None else number != num_stages:
            raise ConfigurationError(
                f"{self.origin} are for {number} stages, but {num_ranks} ranks have "
                f"{f'a multiple of {num_ranks}' if num_stages is None else num_stages} of them. Give costs of that "
                "number of stages, or leave costs out: then they are measured."
            )


def given_costs(costs: StageCosts | str | PathLike[str] | None) -> GivenCosts | None:
    """The strategy's argument, read.

    Raises:
        ConfigurationError: It is something else.
        ScheduleError: The file cannot be read.
    """
    if costs is None:
        return None
    if isinstance(costs, StageCosts):
        return GivenCosts(costs, any(value != 1.0 for value in (costs.held_after_forward, costs.held_after_input)))
    if not isinstance(costs, (str, PathLike)):
        raise ConfigurationError(
            f"costs={costs!r} must be StageCosts, the path of a file that StageCosts.to_json or save_costs wrote, or "
            "None."
        )
    content = read_costs_file(costs)
    units, ranks = content.measured_on.get("stages"), content.measured_on.get("rank_of_stage")
    return GivenCosts(
        StageCosts.from_json(costs),
        content.held_unit == GIB,
        f"the costs in {costs}",
        units if isinstance(units, list) and all(isinstance(names, list) for names in units) else None,
        ranks if isinstance(ranks, list) else None,
        content.measured_on.get(ARE_ALONE) is True,
    )
