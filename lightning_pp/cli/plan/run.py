"""One plan from a config: build what it names without memory, cut, cost, compare, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as L
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_pp.cli.before_launch import trainer_options
from lightning_pp.cli.launch import num_processes_wanted
from lightning_pp.cli.plan.costs import Costs, Speed, check_costs_file, find_speed
from lightning_pp.cli.plan.files import write_files
from lightning_pp.cli.plan.links import find_links
from lightning_pp.cli.plan.memory import PlanMemory
from lightning_pp.cli.plan.report import Plan, print_check, print_plan
from lightning_pp.cli.plan.schedules import PlannedSchedule, Planner, ScheduleTable
from lightning_pp.cli.problems import UserError, full_errors_wanted, user_errors
from lightning_pp.cli.report import wide
from lightning_pp.conf.targets import build, check_targets_of_run
from lightning_pp.errors import BatchError, ConfigurationError, SplitError
from lightning_pp.long_tasks import LongTask
from lightning_pp.planning.hardware.devices import PlannedDevice, dtype_of_precision
from lightning_pp.planning.model_cutter import ModelCutter
from lightning_pp.schedule import available_schedules
from lightning_pp.schedule.registry import is_schedule_file
from lightning_pp.split.fakes.without_memory import parameters_without_memory
from lightning_pp.split.record.source_lines import innermost_user_line
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.strategy.parameters.tensor_units import refuse_other_updates
from lightning_pp.strategy.plan_only import FirstStep, look_at_first_step

_GIB = float(1 << 30)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """What a config asks to be planned.

    Attributes:
        config: The config.
        strategy: The pipeline, for as many devices as are planned for.
        num_devices: Their number.
        devices_about: How that number was found, if it was not given.
        speed: Of a device.
        costs: A file of measured costs, or None.
    """

    config: DictConfig
    strategy: PipelineParallelStrategy
    num_devices: int
    devices_about: str
    speed: Speed
    costs: str | None

    @property
    def limit_bytes(self) -> float | None:
        """What a device may hold; None for no limit."""
        given = self.config.device_memory_gib
        limit_gib = self.strategy.options.device_memory_gib if given is None else given
        return None if limit_gib is None else limit_gib * _GIB


def make_plan(config: DictConfig, console: Console | None = None) -> Plan | None:
    """Makes the plan, prints it and writes its files.

    Returns:
        The plan; None with ``check``.

    Raises:
        UserError: Something asked for cannot be had.
    """
    console = wide(console)
    request = request_of(config)

    def look(step: FirstStep, tell: Callable[[str], None]) -> Plan | None:
        cutter = step.cutter(request.strategy.options, request.strategy.sizes)
        return _look(request, cutter, console, tell)

    return look_at_request(request, look)


def look_at_request(request: Request, look: Callable[[FirstStep, Callable[[str], None]], _T]) -> _T:
    """Builds data and model, and lets ``look`` see the first step, with a function to say how far it is."""
    config = request.config
    # where the step is recorded: on the CPU, unless units are measured on the GPU that they are to run on
    here = torch.device("cpu")
    if config.measure and config.trainer.accelerator != "cpu" and torch.cuda.is_available():
        here = torch.device("cuda", torch.cuda.current_device())
    device_type = "cpu" if config.trainer.accelerator == "cpu" else "cuda"
    device = PlannedDevice(device_type, request.speed.flops_per_byte_of_cuts, here)
    with progress_line() as tell:
        data = build(config.data)
        model = build_without_memory(lambda: build(config.model))
        tell("recording the step by a dry run on the first batch, and cutting it")
        with user_errors(FileNotFoundError), explained(type(model).__name__) if config.check else nullcontext():
            options = trainer_options(config.trainer)
            return look_at_first_step(options, model, data, lambda step: look(step, tell), device)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A context that says on standard error what runs: on a terminal in a line that changes, else if it takes long.

    Yields a function to call with each new text.
    """
    stderr, what = Console(stderr=True), "building data and model"
    if stderr.is_terminal:
        with stderr.status(what) as status:
            yield status.update
        return

    def print_line(line: str) -> None:
        stderr.print(f"lightning-pp-plan: {line}", soft_wrap=True, highlight=False, markup=False)

    with LongTask("planning", print_line) as task:
        task.update(what)
        yield task.update


def request_of(config: DictConfig) -> Request:
    """Everything that can be wrong before a model is built, the cheapest first."""
    costs = config.costs if config.costs is not None else config.strategy.get("costs")
    if config.measure and costs is not None:
        raise UserError(f"measure=true and costs={costs} both say how long units take. Give one of them")
    if not 0 <= config.measure_seconds < float("inf"):
        raise UserError(f"measure_seconds={config.measure_seconds} must be a number of seconds, 0 or more")
    check_costs_file(costs)
    with user_errors():
        check_targets_of_run(config)
    _check_schedule_names(config)
    if config.device_memory_gib is not None and not config.device_memory_gib > 0:
        raise UserError(f"device_memory_gib={config.device_memory_gib} must be a positive number")
    strategy = build(_with_costs(config.strategy, costs))
    if not isinstance(strategy, PipelineParallelStrategy):
        raise UserError(f"strategy={strategy} is not a pipeline, so there is nothing to plan. Use strategy=pipeline")
    num_devices, about = _num_devices(config)
    strategy.num_nodes = 1
    strategy.parallel_devices = [torch.device("cpu")] * num_devices
    # a wrong product, or costs of other ranks, are told before a model is built
    strategy.options.schedule.check_num_ranks(strategy.sizes.pipeline)
    speed = find_speed(
        peak_tflops=config.peak_tflops,
        device=config.device,
        efficiency=config.efficiency,
        links=find_links(config, num_devices, strategy.sizes.pipeline),
        memory_gb_per_s=config.memory_gb_per_s,
        dtype=dtype_of_precision(config.trainer.precision),
        accelerator=config.trainer.accelerator,
    )
    if config.model.get("float8") is not None:
        speed = replace(speed, about=f"{speed.about}; float8 at the same rate, since its own is not known")
    return Request(config, strategy, num_devices, about, speed, costs)


def _check_schedule_names(config: DictConfig) -> None:
    known = available_schedules()
    unknown = [name for name in config.schedules or [] if name not in known and not is_schedule_file(name)]
    if config.show not in (*known, "best", "configured") and not is_schedule_file(config.show):
        unknown.append(config.show)
    if unknown:
        raise UserError(f"unknown schedule {unknown[0]!r}. Choose one of {', '.join(known)}, or a .csv file")


def _num_devices(config: DictConfig) -> tuple[int, str]:
    """Devices to plan for: those of the config, else those of this machine, else as few as the sizes need."""
    devices = config.trainer.devices
    wants_all = devices in ("auto", -1, "-1")
    if not wants_all:
        return num_processes_wanted(config.trainer), ""
    pipeline = config.strategy.get("pipeline_parallel_size", "auto")
    replicas, tensor = config.strategy.get("data_parallel_size", "auto"), config.strategy.get("tensor_parallel_size", 1)
    num_here = torch.cuda.device_count() if config.trainer.accelerator != "cpu" else 0
    least = math.prod(size for size in (pipeline, replicas, tensor) if isinstance(size, int))
    if num_here and num_here * config.trainer.num_nodes % least == 0:
        return num_here * int(config.trainer.num_nodes), ""
    if pipeline == "auto":
        raise UserError(
            f"trainer.devices={devices}, but there are no such devices here. Give the number to plan for with "
            "trainer.devices=NUMBER, or give strategy.pipeline_parallel_size"
        )
    about = f"trainer.devices={devices}: planned for the fewest devices. trainer.devices=NUMBER plans for more"
    return least, about


def _look(request: Request, cutter: ModelCutter, console: Console, tell: Callable[[str], None]) -> Plan | None:
    config, options = request.config, request.strategy.options
    times = cutter.measure_units(config.measure_seconds, tell) if config.measure and not config.check else None
    costs = Costs(request.speed, request.costs, options.cut, times)
    if costs.are_alone and cutter.sizes.tensor > 1:
        raise UserError(
            f"Units are measured whole, but strategy.tensor_parallel_size={cutter.sizes.tensor} cuts their matrices. "
            "Leave out measure= and costs= to plan with estimated times"
        )
    limit = request.limit_bytes
    cut = cutter.split(cutter.placement())
    if cutter.optimizer is not None and cut.split.on_parts is not None:  # as training does
        refuse_other_updates(cutter.optimizer, cut.split.on_parts.cut_parameters)
    memory = cutter.memory_model
    planner = Planner(cutter, costs, PlanMemory(memory), limit)
    if config.check:
        print_check(console, cutter, cut.split, f"training_step, on the first batch of {config.data.get('_target_')}")
        return None
    costs.calibrate(cut)
    table = planner.table(config.schedules, tell)
    configured = table.named(options.schedule.source.name, cut.split.placement)
    shown = _shown(config.show, table, configured, limit)
    assumptions = tuple(filter(None, (request.devices_about, memory.assumed)))
    plan = Plan(cutter, request.strategy, request.num_devices, assumptions, costs, limit, table, shown, configured)
    print_plan(console, plan)
    if config.out is not None:
        for path in write_files(plan, Path(config.out)):
            console.print(f"written: {path}", soft_wrap=True)
    return plan


def _shown(show: str, table: ScheduleTable, configured: PlannedSchedule | None, limit: float | None) -> PlannedSchedule:
    if show == "best":
        if table.best is None:
            raise _nothing_fits(table, limit)
        return table.best
    found = configured if show == "configured" else table.named(show)
    if found is None:
        reasons = [unusable.reason for unusable in table.unusable if unusable.name == show]
        raise UserError(f"show={show} is not possible here: {reasons[0] if reasons else 'it is not in schedules='}")
    return found


def _nothing_fits(table: ScheduleTable, limit: float | None) -> UserError:
    least = min(table.usable, key=lambda one: one.peak_bytes, default=None)
    if least is None or limit is None:
        reasons = "\n".join(f"  {one.name}: {one.reason}" for one in table.unusable)
        return UserError(f"no schedule is possible here:\n{reasons}")
    fullest = max(least.memory, key=lambda rank: rank.peak)
    smaller = "make microbatches smaller (strategy.num_microbatches)"
    if least.schedule.whole_batch_loss:
        smaller = (
            "use fewer samples in a batch: with whole_batch_loss all of its microbatches are held at once "
            "(strategy.activation_checkpointing makes them smaller)"
        )
    return UserError(
        f"device_memory_gib={limit / _GIB:g} is too small for every schedule. {least.name} needs the least: "
        f"{fullest.peak / _GIB:.3g} GiB on rank {fullest.rank}, of which "
        f"{(fullest.peak - fullest.activations - fullest.buffers) / _GIB:.3g} GiB are parameters, gradients and "
        f"optimizer state. Use more pipeline ranks, shard over more devices, or {smaller}"
    )


@contextmanager
def explained(name: str) -> Iterator[None]:
    """In the block, any error becomes one that says why the module ``name`` cannot be cut, with the user's line."""
    try:
        yield
    except UserError:
        raise
    except (BatchError, ConfigurationError, SplitError) as error:
        raise UserError(f"{name} cannot be cut: {error}") from error
    except Exception as error:
        if full_errors_wanted():
            raise
        raise UserError(
            f"{name} cannot be checked: {type(error).__name__} at {innermost_user_line(error)}: {error}"
        ) from error


def build_without_memory(build: Callable[[], Any]) -> L.LightningModule:
    """A module whose parameters have no memory; with memory, if its constructor reads them."""
    try:
        with parameters_without_memory():
            return _module(build())
    except UserError:
        raise
    except Exception:
        return _module(build())


def _module(built: Any) -> L.LightningModule:
    if not isinstance(built, L.LightningModule):
        raise UserError(f"{type(built).__name__} is not a LightningModule")
    return built


def _with_costs(config: DictConfig, costs: str | None) -> Any:
    """The strategy's config with the file that was given for the plan: training by it cuts by it, too."""
    return config if costs is None or "costs" not in config else OmegaConf.merge(config, {"costs": costs})
