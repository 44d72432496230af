"""What F, I, W and transfers cost on every stage of a cut: measured, or estimated from FLOPs and bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_pp.cli.problems import UserError
from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.model_cutter import Cut
from lightning_pp.planning.plan_summary import CrossingSummary
from lightning_pp.schedule import Placement, StageCosts
from lightning_pp.schedule.simulation.costs import PerStage
from lightning_pp.split.cut.unit_costs import UnitCost, calibrated, stage_costs

_PREFIXES = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
_MAKERS = ("nvidia", "geforce", "tesla")


@dataclass(frozen=True)
class Speed:
    """How fast a device is thought to be.

    Attributes:
        flops_per_s: Floating point operations per second that it reaches; None if nothing is known, and then times are
            relative.
        link_bytes_per_s: Bytes per second between two ranks.
        about: Where the numbers come from.
    """

    flops_per_s: float | None
    link_bytes_per_s: float
    about: str


def find_speed(
    *,
    peak_tflops: float | None,
    device: str | None,
    efficiency: float,
    link_gb_per_s: float,
    dtype: torch.dtype,
    accelerator: str,
) -> Speed:
    """The speed of the device that a plan is for.

    Args:
        peak_tflops: The user's number, 10¹² floating point operations per second; it comes before the others.
        device: Name of a device that Lightning has numbers for.
        efficiency: The share of the peak that is reached.
        link_gb_per_s: 10⁹ bytes per second between two ranks.
        dtype: What matrices are multiplied in.
        accelerator: ``trainer.accelerator``; unless it is ``cpu`` the GPU of this machine is asked, if there is one.

    Raises:
        UserError: A number is not positive, or the device is unknown.
    """
    for name, value in (("efficiency", efficiency), ("link_gb_per_s", link_gb_per_s), ("peak_tflops", peak_tflops)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name}={value} must be a positive number")
    if efficiency > 1:
        raise UserError(f"efficiency={efficiency} must be at most 1: it is the share of the peak that is reached")
    link = 1e9 * link_gb_per_s
    if peak_tflops is not None:
        peak, whose = 1e12 * peak_tflops, "peak_tflops"
    elif device is not None:
        peak, whose = _peak_of_named(device, dtype), f"{device}, {_short(dtype)}, by Lightning's table"
    elif accelerator != "cpu" and torch.cuda.is_available():
        found = _peak_of_this_gpu(dtype)
        if found is None:
            return Speed(None, link, f"no FLOP/s are known for {torch.cuda.get_device_name()} in {_short(dtype)}")
        peak, whose = found, f"{torch.cuda.get_device_name()}, {_short(dtype)}, by Lightning's table"
    else:
        return Speed(None, link, "no FLOP/s are known for this machine")
    about = f"{peak / 1e12:g} TFLOP/s ({whose}) x efficiency {efficiency:g}, transfers at {link_gb_per_s:g} GB/s"
    return Speed(peak * efficiency, link, about)


def _peak_of_this_gpu(dtype: torch.dtype) -> float | None:
    from lightning.fabric.utilities.throughput import get_available_flops

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_available_flops(torch.device("cuda"), dtype)


def _peak_of_named(device: str, dtype: torch.dtype) -> float:
    from lightning_pp.cli._lightning_private import FLOPS_OF_GPUS

    words = [word for word in device.lower().replace("-", " ").replace("_", " ").split() if word not in _MAKERS]
    name = " ".join(words)
    if name not in FLOPS_OF_GPUS:
        raise UserError(
            f"device={device} is not known: choose one of {', '.join(FLOPS_OF_GPUS)}, or give peak_tflops=NUMBER"
        )
    peaks = FLOPS_OF_GPUS[name]
    if dtype not in peaks:
        raise UserError(f"no FLOP/s are known for device={device} in {_short(dtype)}: give peak_tflops=NUMBER")
    return float(peaks[dtype])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Costs:
    """Gives the costs of the stages of any cut of one model.

    Args:
        speed: For estimates.
        path: A file of measured costs, or None.
        wishes: What the user says of the cuts, and of how fast ranks are.
    """

    def __init__(self, speed: Speed, path: str | None, wishes: CutOptions) -> None:
        self._speed = speed
        self._wishes = wishes
        self._path = path
        self._measured = None if path is None else StageCosts.from_json(path)
        self._scale: tuple[float, str] | None = None
        self._calibrated: Mapping[str, UnitCost] | None = None

    @property
    def unit(self) -> str:
        """The unit of all times, once costs were asked for: ``ms``, or FLOPs where they are relative."""
        return self._scale[1] if self._scale is not None else "ms"

    @property
    def link_bytes_per_ms(self) -> float | None:
        """Bytes per millisecond between two ranks; None where times are relative."""
        return None if self._speed.flops_per_s is None else self._speed.link_bytes_per_s / 1e3

    @property
    def about(self) -> str:
        """Where the times come from."""
        if self._measured is not None:
            return f"measured, {self._path}"
        if self._speed.flops_per_s is not None:
            return f"estimated from FLOPs: {self._speed.about}"
        return (
            f"relative, in {self.unit}s of one rank, transfers free: {self._speed.about}; give device=NAME, "
            "peak_tflops=NUMBER or costs=FILE for milliseconds"
        )

    def calibrate(self, cut: Cut) -> None:
        """Learns from measured costs of unknown stages what units cost, as if ``cut`` were what they were measured on.

        Raises:
            UserError: The file has costs for another number of stages.
        """
        if self._measured is None or cut.is_measured:
            return
        split = cut.split
        num_stages = split.placement.num_stages
        if self._measured.num_stages not in (None, num_stages):
            raise UserError(
                f"costs={self._path} has costs of {self._measured.num_stages} stages, and the pipeline that is "
                f"configured has {num_stages}: measure it again, or set strategy.pipeline_parallel_size, "
                "strategy.schedule and strategy.stages_per_rank to what was measured"
            )
        units_of_stages = [split.partition.units_of_stage(stage) for stage in range(num_stages)]
        try:
            self._calibrated = calibrated(split.partition.unit_costs, self._measured, units_of_stages)
        except (ConfigurationError, ScheduleError) as error:
            raise UserError(f"costs={self._path}: {error}") from error

    def of(
        self,
        cut: Cut,
        crossings: Sequence[CrossingSummary],
        held_after_forward: Sequence[float],
        held_after_input: Sequence[float],
    ) -> StageCosts:
        """The costs of the stages of ``cut``.

        Args:
            cut: The cut.
            crossings: What crosses in it.
            held_after_forward: What a microbatch holds on each stage after F, bytes.
            held_after_input: The same after I.
        """
        split = cut.split
        units = self._calibrated if self._calibrated is not None else split.partition.unit_costs
        costs = stage_costs(
            units,
            split.partition.stage_of_unit,
            self._wishes.speeds_of_stages(split.placement),
            held_after_forward=held_after_forward,
            held_after_input=held_after_input,
        )
        if self._measured is not None:
            p2p, p2p_back = self._measured_transfers(split.placement)
            return replace(costs, p2p=p2p, p2p_back=p2p_back)
        if self._speed.flops_per_s is None:
            if self._scale is None:
                largest = max(costs.per_stage(split.placement.num_stages).forward)
                self._scale = next(prefix for prefix in _PREFIXES if largest >= prefix[0] or prefix[0] == 1.0)
            return scaled(costs, 1 / self._scale[0])
        return replace(
            scaled(costs, 1e3 / self._speed.flops_per_s),
            p2p=_transfers(split.placement, crossings, 1e3 / self._speed.link_bytes_per_s),
        )

    def _measured_transfers(self, placement: Placement) -> tuple[PerStage, PerStage]:
        """To the next stage, and to the one before; with another number of stages the longest there are."""
        assert self._measured is not None
        measured = self._measured.per_stage(self._measured.num_stages or placement.num_stages)
        if len(measured.p2p) == placement.num_stages:
            return measured.p2p, measured.p2p_back
        longest = max(*measured.p2p, *measured.p2p_back)
        return longest, longest


def _transfers(placement: Placement, crossings: Sequence[CrossingSummary], ms_per_byte: float) -> tuple[float, ...]:
    """Time of one transfer by the stage that sends; the longer of its two directions."""
    forward, back = [0.0] * placement.num_stages, [0.0] * placement.num_stages
    for crossing in crossings:
        if crossing.is_sent:
            forward[crossing.source] += crossing.forward_bytes * ms_per_byte
            back[crossing.target] += crossing.gradient_bytes * ms_per_byte
    return tuple(map(max, forward, back))


def scaled(costs: StageCosts, factor: float) -> StageCosts:
    """``costs`` with the times of F, I and W multiplied."""

    def times(value: float | Sequence[float]) -> float | tuple[float, ...]:
        return value * factor if isinstance(value, (int, float)) else tuple(number * factor for number in value)

    return replace(
        costs,
        forward=times(costs.forward),
        backward_input=times(costs.backward_input),
        backward_weight=times(costs.backward_weight),
    )


def check_costs_file(path: str | None) -> None:
    """Says that a file of costs is missing or unreadable, before anything is built.

    Raises:
        UserError: It is.
    """
    if path is None:
        return
    if not Path(path).exists():
        raise UserError(f"costs={path} does not exist (looked from {Path.cwd()})")
    try:
        StageCosts.from_json(path)
    except ScheduleError as error:
        raise UserError(f"costs={path}: {error}") from error
