"""Costs of F, I, W and transfers on every stage of a cut: measured, or estimated from FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lightning_pp.cli.plan.links import about_links, device_name
from lightning_pp.cli.problems import UserError
from lightning_pp.errors import ConfigurationError, ScheduleError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.hardware.devices import (
    SHARE_OF_BANDWIDTH,
    flops_per_byte,
    gpu_bandwidth,
    named_bandwidth,
)
from lightning_pp.planning.hardware.links import Links, transfer_times
from lightning_pp.planning.model_cutter import Cut
from lightning_pp.planning.plan_summary import CrossingSummary
from lightning_pp.planning.schedules.given_costs import given_costs
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.unit_times.measure import UnitTimes
from lightning_pp.schedule import Placement, StageCosts
from lightning_pp.schedule.simulation.costs import PerStage
from lightning_pp.split.cut.unit_costs import UnitCost, calibrated, estimate_unit_costs, stage_costs, weighted
from lightning_pp.strategy.parameters.device_speed import peak_flops_of

_PREFIXES = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))


@dataclass(frozen=True)
class Speed:
    """The assumed speed of a device.

    Attributes:
        flops_per_s: Floating point operations per second that it reaches; None if nothing is known, and then times are
            relative.
        links: What messages take.
        about: Where the numbers come from.
        memory_bytes_per_s: Bytes per second from and to its memory that it reaches; None if that is not known.
        flops_per_byte_of_cuts: FLOPs in the time in which a byte is moved that training would cut by on this device.
    """

    flops_per_s: float | None
    links: Links
    about: str
    memory_bytes_per_s: float | None = None
    flops_per_byte_of_cuts: float = 0.0

    @property
    def flops_per_byte(self) -> float:
        """FLOPs in the time in which a byte is moved; 0 where that is not known."""
        if self.flops_per_s is None or self.memory_bytes_per_s is None:
            return 0.0
        return self.flops_per_s / self.memory_bytes_per_s


def find_speed(
    *,
    peak_tflops: float | None,
    device: str | None,
    efficiency: float,
    links: Links,
    memory_gb_per_s: float | None,
    dtype: torch.dtype,
    accelerator: str,
) -> Speed:
    """The speed of the device that a plan is for.

    Args:
        peak_tflops: The user's number, 10¹² floating point operations per second; it comes before the others.
        device: Name of a device that Lightning has numbers for.
        efficiency: The share of the peak that is reached.
        links: What messages take.
        memory_gb_per_s: 10⁹ bytes per second of the device's memory that are reached; None for what is known of it.
        dtype: What matrices are multiplied in.
        accelerator: ``trainer.accelerator``; unless it is ``cpu`` the GPU of this machine is asked, if there is one.

    Raises:
        UserError: A number is not positive, or the device is unknown.
    """
    given = {"efficiency": efficiency, "peak_tflops": peak_tflops, "memory_gb_per_s": memory_gb_per_s}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name}={value} must be a positive number")
    if efficiency > 1:
        raise UserError(f"efficiency={efficiency} must be at most 1: it is the share of the peak that is reached")
    bandwidth: float | None = None
    if peak_tflops is not None:
        peak, whose = 1e12 * peak_tflops, "peak_tflops"
    elif device is not None:
        peak, whose = _named_peak(device, dtype), f"{device}, {_short(dtype)}, by Lightning's table"
        bandwidth = named_bandwidth(device_name(device))
    elif accelerator != "cpu" and torch.cuda.is_available():
        here = torch.device("cuda", torch.cuda.current_device())
        found = peak_flops_of(here, dtype)
        if found is None:
            return Speed(None, links, f"the FLOP/s of {torch.cuda.get_device_name()} in {_short(dtype)} are not known")
        peak, whose = found, f"{torch.cuda.get_device_name()}, {_short(dtype)}, by Lightning's table"
        bandwidth = gpu_bandwidth(here)
    else:
        return Speed(None, links, "the FLOP/s of this machine are not known")
    about = f"{peak / 1e12:g} TFLOP/s ({whose}) x efficiency {efficiency:g}, "
    memory = None if bandwidth is None else SHARE_OF_BANDWIDTH * bandwidth
    if memory_gb_per_s is not None:
        memory = 1e9 * memory_gb_per_s
        bandwidth = memory / SHARE_OF_BANDWIDTH
    about += "memory not known" if memory is None else f"memory at {memory / 1e9:g} GB/s"
    about += f", {about_links(links)}"
    return Speed(peak * efficiency, links, about, memory, flops_per_byte(peak, bandwidth))


def _named_peak(device: str, dtype: torch.dtype) -> float:
    from lightning_pp.cli._lightning_private import FLOPS_OF_GPUS

    name = device_name(device)
    if name not in FLOPS_OF_GPUS:
        raise UserError(
            f"device={device} is not known. Choose one of {', '.join(FLOPS_OF_GPUS)}, or give peak_tflops=NUMBER"
        )
    peaks = FLOPS_OF_GPUS[name]
    if dtype not in peaks:
        raise UserError(f"the FLOP/s of device={device} in {_short(dtype)} are not known. Give peak_tflops=NUMBER")
    return float(peaks[dtype])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Costs:
    """Computes the costs of the stages of any cut of one model.

    Args:
        speed: For estimates.
        path: A file of measured costs, or None.
        wishes: What the user says of the cuts, and of how fast ranks are.
        unit_times: What has measured the units that are cut; None: nothing has.
    """

    def __init__(self, speed: Speed, path: str | None, wishes: CutOptions, unit_times: UnitTimes | None = None) -> None:
        self._speed = speed
        self._wishes = wishes
        self._path = path
        self.unit_times = unit_times
        given = None if unit_times is not None else given_costs(path)
        # of units alone nothing but the cuts' own costs is used
        self.are_alone = unit_times is not None or (given is not None and given.are_alone)
        self._measured = None if given is None or given.are_alone else given.stages
        self._scale: tuple[float, str] | None = None
        self._calibrated: Mapping[str, UnitCost] | None = None

    @property
    def unit(self) -> str:
        """The unit of all times, once costs were asked for: ``ms``, or FLOPs where they are relative."""
        return self._scale[1] if self._scale is not None else "ms"

    @property
    def links(self) -> Links | None:
        """What messages take; None where times are relative, and these are free."""
        is_relative = self._measured is None and not self.are_alone and self._speed.flops_per_s is None
        return None if is_relative else self._speed.links

    @property
    def about(self) -> str:
        """Where the times come from."""
        transfers = about_links(self._speed.links)
        if self.unit_times is not None:
            return f"measured: {self.unit_times.about}, {transfers}"
        if self.are_alone:
            return f"measured on units alone, {self._path}, {transfers}"
        if self._measured is not None:
            return f"measured, {self._path}"
        if self._speed.flops_per_s is not None:
            what = "FLOPs and bytes" if self._speed.memory_bytes_per_s is not None else "FLOPs"
            return f"estimated from {what}: {self._speed.about}"
        return (
            f"relative, in {self.unit}s of one rank, without transfers: {self._speed.about}; give device=NAME, "
            "peak_tflops=NUMBER or costs=FILE for milliseconds"
        )

    def calibrate(self, cut: Cut) -> None:
        """Learns from measured costs of unknown stages what units cost, as if ``cut`` were what they were measured on.

        Raises:
            UserError: The file has costs for another number of stages, or of other units that ran alone.
        """
        if self.are_alone and not cut.is_measured:
            raise UserError(
                f"costs={self._path} has times of units that ran alone, but not of every unit of this model. Measure "
                "again with lightning-pp-plan --measure"
            )
        if self._measured is None or cut.is_measured:
            return
        split = cut.split
        num_stages = split.placement.num_stages
        if self._measured.num_stages not in (None, num_stages):
            raise UserError(
                f"costs={self._path} has costs of {self._measured.num_stages} stages, but the configured pipeline has "
                f"{num_stages}. Measure again, or set strategy.pipeline_parallel_size, strategy.schedule and "
                "strategy.stages_per_rank as they were measured"
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
        units = self._units(cut)
        costs = stage_costs(units, split.partition.stage_of_unit, self._wishes.speeds_of_stages(split.placement))
        costs = replace(costs, held_after_forward=held_after_forward, held_after_input=held_after_input)
        if self._measured is not None:
            p2p, p2p_back = self._measured_transfers(split.placement)
            return replace(costs, p2p=p2p, p2p_back=p2p_back)
        if self.are_alone:
            if not cut.is_measured:
                raise ConfigurationError("this cut has other units than those that ran alone")
            return self._with_messages(costs, split, crossings)
        if self._speed.flops_per_s is None:
            if self._scale is None:
                largest = max(costs.per_stage(split.placement.num_stages).forward)
                self._scale = next(prefix for prefix in _PREFIXES if largest >= prefix[0] or prefix[0] == 1.0)
            return scaled(costs, 1 / self._scale[0])
        return self._with_messages(scaled(costs, 1e3 / self._speed.flops_per_s), split, crossings)

    def _with_messages(self, costs: StageCosts, split: SplitModel, crossings: Sequence[CrossingSummary]) -> StageCosts:
        """``costs`` with what goes between stages, and in F and I what tensor ranks communicate, beside a part of W."""
        p2p, p2p_back = transfer_times(crossings, split.placement, self._speed.links)
        costs, on_parts = replace(costs, p2p=p2p, p2p_back=p2p_back), split.on_parts
        if on_parts is None:
            return costs
        resolved, link = (
            costs.per_stage(split.placement.num_stages),
            self._speed.links.between_neighbours(on_parts.size),
        )
        times = {name: list(getattr(resolved, name)) for name in ("forward", "backward_input", "backward_weight")}
        for unit, stage in split.partition.stage_of_unit.items():
            in_forward, beside, again = (link.ms(each.num_bytes, each.number) for each in on_parts.count_traffic(unit))
            for name, ms in zip(times, (in_forward, beside + again, -beside), strict=True):
                times[name][stage] = max(0.0, times[name][stage] + ms)
        for one in crossings:
            times["forward"][one.target] += link.ms(one.joined_bytes)
            times["backward_input"][one.source] += link.ms(one.joined_bytes) if one.gradient_bytes else 0.0
        return replace(costs, **times)

    def _units(self, cut: Cut) -> Mapping[str, UnitCost]:
        """Costs of units, in FLOPs or, where they are measured, in milliseconds."""
        if self._calibrated is not None:
            return self._calibrated
        split = cut.split
        if cut.is_measured or self._speed.flops_per_byte == self._speed.flops_per_byte_of_cuts:
            return split.partition.unit_costs
        counted = split.counted
        units = estimate_unit_costs(counted.record, counted.num_parameters, self._speed.flops_per_byte)
        return weighted(units, self._wishes.unit_weights or {})

    def _measured_transfers(self, placement: Placement) -> tuple[PerStage, PerStage]:
        """To the next stage, and to the one before; with another number of stages the longest there are."""
        assert self._measured is not None
        measured = self._measured.per_stage(self._measured.num_stages or placement.num_stages)
        if len(measured.p2p) == placement.num_stages:
            return measured.p2p, measured.p2p_back
        longest = max(*measured.p2p, *measured.p2p_back)
        return longest, longest


def scaled(costs: StageCosts, factor: float) -> StageCosts:
    """``costs`` with the times of F, I and W multiplied."""
    names = "forward", "backward_input", "backward_weight"
    return replace(costs, **{name: np.multiply(getattr(costs, name), factor).tolist() for name in names})


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
