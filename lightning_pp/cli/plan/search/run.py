"""One search from a config: its space of plans, the search, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_pp.cli.plan.costs import Costs
from lightning_pp.cli.plan.run import Request, look_at_request, request_of
from lightning_pp.cli.plan.schedules import known_schedules
from lightning_pp.cli.plan.search.plans import PlanSearch
from lightning_pp.cli.plan.search.report import Search, nothing_fits, print_search
from lightning_pp.cli.plan.search.space import MODEL_CHECKPOINTS, Space
from lightning_pp.cli.problems import UserError
from lightning_pp.cli.report import wide
from lightning_pp.collector import collector_paused
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import AUTO, ActivationCheckpointing
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.schedule.registry import is_schedule_file, schedule_family
from lightning_pp.sharding.shard_updates import is_elementwise
from lightning_pp.split.data.microbatch import batch_size_of
from lightning_pp.strategy.plan_only import FirstStep

_TENSOR_SIZES = (1, 2, 4, 8)
# what a search chooses is as if it were not configured
_CHOSEN: dict[str, Any] = {
    "pipeline_parallel_size": "auto",
    "data_parallel_size": "auto",
    "tensor_parallel_size": 1,
    "data_parallel_replicate_size": 1,
    "num_microbatches": "auto",
    "schedule": "1f1b",
    "stages_per_rank": None,
    "search_seconds": None,
}


def search_plans(config: DictConfig, console: Console | None = None) -> Search:
    """Compares all plans for the devices of ``config``, and prints the best.

    Raises:
        UserError: Something asked for cannot be had, or no plan fits.
    """
    console = wide(console)
    _check(config)
    began = time.monotonic()
    neutral = _neutral(config)
    request = request_of(neutral)
    if request.speed.flops_per_s is None:
        raise UserError(
            "search=true compares computation with communication, so it must know how fast a device is. Give "
            "device=NAME or peak_tflops=NUMBER"
        )
    key = config.batch_size_key if OmegaConf.select(config, config.batch_size_key) is not None else None
    num_replicas = _num_replicas(config, request.num_devices, key)

    def look(step: FirstStep, tell: Callable[[str], None]) -> Search:
        options, limit = request.strategy.options, request.limit_bytes
        space = _space(config, request, key, num_replicas, step)
        with collector_paused():  # of its objects nearly all stay
            result = PlanSearch(step, options, space, request.speed, limit).run(tell)
        about = Costs(request.speed, None, options.cut).about
        return Search(config, key, space, result, about, limit, type(step.module).__name__)

    search = look_at_request(request, look)
    search.seconds = time.monotonic() - began
    if not search.result.best:
        raise nothing_fits(search)
    print_search(console, search)
    return search


def _check(config: DictConfig) -> None:
    """Says what is of one plan, and so of no use to a search."""
    given = {
        "check": config.check,
        "measure": config.measure,
        "out": config.out is not None,
        "show": config.show != "best",
        "costs": config.costs is not None,
        **{
            f"strategy.{name}": config.strategy.get(name) is not None
            for name in ("costs", "split_points", "rank_speeds", "split_batch")
        },
    }
    for name, is_given in given.items():
        if is_given:
            raise UserError(
                f"search=true compares plans of different sizes, but {name}= is for one of them. Leave one out"
            )
    if config.samples_per_step is not None and config.samples_per_step < 1:
        raise UserError(f"samples_per_step={config.samples_per_step} must be at least 1")
    files = [name for name in config.schedules or [] if is_schedule_file(name)]
    if files:
        raise UserError(f"schedules has the file {files[0]}, which is for one size, but search=true compares many")


def _neutral(config: DictConfig) -> DictConfig:
    """``config`` without what the search chooses."""
    neutral = config.copy()
    for name, value in _CHOSEN.items():
        if name in neutral.strategy:
            neutral.strategy[name] = value
    if neutral.strategy.get("activation_checkpointing") == AUTO:  # a search tries none and all
        neutral.strategy.activation_checkpointing = False
    if OmegaConf.select(neutral, MODEL_CHECKPOINTS) is not None:
        OmegaConf.update(neutral, MODEL_CHECKPOINTS, False)
    return neutral


def _num_replicas(config: DictConfig, num_devices: int, key: str | None) -> int | None:
    """Replicas as configured; None if that is not for so many devices, and the samples of a step are given."""
    sizes = config.strategy
    try:
        return ParallelSizes.resolve(
            sizes.pipeline_parallel_size,
            sizes.data_parallel_size,
            num_devices,
            tensor=sizes.get("tensor_parallel_size", 1),
        ).data_parallel
    except ConfigurationError as error:
        if config.samples_per_step is None or key is None:
            raise UserError(
                "the number of samples in a step is not known, because the configuration is not for "
                f"{num_devices} devices: {error} Fix it, or give the samples of all replicas: "
                "samples_per_step=NUMBER"
            ) from error
        return None


def _space(config: DictConfig, request: Request, key: str | None, num_replicas: int | None, step: FirstStep) -> Space:
    options = request.strategy.options
    batch_size = batch_size_of(step.batch, options.batches.batch_dim)
    if batch_size is None:
        raise UserError("search=true divides a batch by its samples, but cannot count them in the first batch")
    num_samples = config.samples_per_step or batch_size * (num_replicas or 0)
    if key is not None and OmegaConf.select(config, key) != batch_size:
        raise UserError(
            f"{key}={OmegaConf.select(config, key)}, but the first batch has {batch_size} samples. Name the field of "
            "the configuration that sets a replica's batch size: batch_size_key=NAME. With a name that does not "
            "exist, the number of replicas is kept"
        )
    if key is None and num_samples != batch_size * (num_replicas or 0):
        raise UserError(
            f"samples_per_step={num_samples}, but {num_replicas} replicas read {batch_size * (num_replicas or 0)}, "
            f"{batch_size} each. The batch size cannot be set: {config.batch_size_key} is not in the configuration"
        )
    names = config.schedules or [name for name in known_schedules() if not schedule_family(name).is_search]
    devices = request.num_devices
    per_node = request.speed.links.ranks_per_node or devices
    may_cut = step.optimizer is None or is_elementwise(step.optimizer)
    return Space(
        devices,
        per_node,
        num_samples,
        num_replicas if key is None else None,
        list(dict.fromkeys(names)),
        _values_of_checkpointing(options),
        options.sharding,
        [size for size in _TENSOR_SIZES if size == 1 or (may_cut and devices % size == per_node % size == 0)],
    )


def _values_of_checkpointing(options: PipelineOptions) -> list[ActivationCheckpointing]:
    """None, all repeated blocks, and what is configured."""
    configured = options.activation_checkpointing
    return [False, True, *([configured] if not isinstance(configured, bool) else [])]
