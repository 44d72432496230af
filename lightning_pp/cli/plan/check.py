"""``lightning-pp-plan --check package.module:MyModule``: whether a module can be cut, without a GPU.

::

    lightning-pp-plan --check my_package.my_module:MyModule --stages 4 width=512 layers=12
    lightning-pp-plan --check my_module:MyModule --batch my_module:make_batch --config arguments.yaml
    lightning-pp-plan --check recipe=llama            # what a config names

The batch comes from ``--batch`` (a function without arguments, a DataLoader or a LightningDataModule), or else from
the module's own ``train_dataloader``, or else from its ``example_input_array``: then ``forward`` is what is checked.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pp.cli.export.module import named
from lightning_pp.cli.plan.report import print_check
from lightning_pp.cli.plan.run import build_without_memory, explained
from lightning_pp.cli.problems import UserError
from lightning_pp.cli.report import wide
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.model_cutter import ModelCutter, StepToCut
from lightning_pp.planning.pipeline_options import BatchOptions, PipelineOptions
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.schedule import Placement
from lightning_pp.split.data.microbatch import split_batch
from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.fakes.without_memory import parameters_without_memory
from lightning_pp.split.record.source_lines import innermost_user_line
from lightning_pp.strategy.plan_only import look_at_first_step


def run_check(arguments: Sequence[str], console: Console | None = None) -> None:
    """Checks the class that ``arguments`` name, and prints what was found.

    Raises:
        UserError: The module cannot be cut, or something asked for cannot be had.
    """
    options = _parsed(arguments)
    console = wide(console)
    kind = named(options.check, "--check")
    if not (isinstance(kind, type) and issubclass(kind, L.LightningModule)):
        raise UserError(f"--check {options.check} names {_described(kind)}, not a LightningModule class")
    keywords = _constructor_arguments(kind, options.config, options.arguments)
    data = None if options.batch is None else _data(options.batch)
    module = build_without_memory(lambda: kind(**keywords))
    pipeline = PipelineOptions(
        ScheduleOptions(schedule_source("1f1b")),
        BatchOptions(options.microbatches or "auto"),
        CutOptions(options.split_points, units=options.units),
    )
    sizes = ParallelSizes(options.stages, 1)

    def look(cutter: ModelCutter) -> None:
        found = cutter.split(Placement.interleaved(options.stages)).split
        print_check(console, cutter, found, about)

    with explained(options.check):
        if data is not None or is_overridden("train_dataloader", module):
            source = f"--batch {options.batch}" if data is not None else "its train_dataloader"
            about = f"training_step, on the first batch of {source}"
            asked = {"precision": options.precision}
            look_at_first_step(asked, module, data, lambda step: look(step.cutter(pipeline, sizes)))
        else:
            about = "forward, on its example_input_array; training_step was not run, since there is no batch (--batch)"
            look(forward_cutter(module, pipeline, sizes))


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-pp-plan", description="Checks whether a module can be cut, and where."
    )
    add = parser.add_argument
    add("--check", metavar="MODULE:CLASS", required=True, help="the LightningModule; may be in the current folder")
    add("--batch", metavar="MODULE:NAME", help="a function that makes a batch, a DataLoader or a LightningDataModule")
    add("--config", metavar="FILE", help="a YAML file of constructor arguments")
    add("--stages", type=_positive, default=2, help="how many stages to cut into (2)")
    add("--microbatches", type=_positive, help="how many microbatches to cut a batch into (2 to 4 a stage)")
    add("--units", nargs="+", metavar="NAME", help="modules that stay whole, or shell patterns of them")
    add("--split-points", nargs="+", metavar="UNIT", help="the units that start stages 1, 2, ...")
    add("--precision", default="32-true", help="as the Trainer takes it (32-true)")
    add("arguments", nargs="*", metavar="key=value", help="constructor arguments")
    return parser.parse_intermixed_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _described(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"


def _constructor_arguments(kind: type, file: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """Arguments from the file, and over them those of the command line; all that do not fit are named at once."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UserError(f"{wrong[0]!r} is not a constructor argument. Write key=value")
    try:
        config = OmegaConf.create({}) if file is None else OmegaConf.load(file)
        merged = OmegaConf.to_container(OmegaConf.merge(config, OmegaConf.from_dotlist(list(pairs))), resolve=True)
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"the constructor arguments cannot be read: {error}") from error
    keywords = {str(name): value for name, value in merged.items()} if isinstance(merged, dict) else {}
    parameters = list(inspect.signature(kind).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    problems = [f"{name} is not one of its arguments" for name in keywords if name not in named and not takes_any]
    problems += [f"{name} is missing" for name, p in named.items() if p.default is p.empty and name not in keywords]
    if problems:
        raise UserError(
            f"{kind.__name__} cannot be built: {'; '.join(problems)}. It takes {', '.join(named) or 'no arguments'}. "
            "Give them as key=value or with --config FILE"
        )
    return keywords


def _data(target: str) -> Any:
    """What to read the batch from: a LightningDataModule or a loader."""
    found = named(target, "--batch")
    if callable(found) and not isinstance(found, (DataLoader, L.LightningDataModule)):
        try:
            found = found()
        except Exception as error:
            raise UserError(
                f"--batch {target} raises {type(error).__name__} at {innermost_user_line(error)}: {error}"
            ) from error
    if isinstance(found, (DataLoader, L.LightningDataModule)):
        return found
    if not tensors_of(found):
        raise UserError(f"--batch {target} returns {_described(found)} without tensors, not a batch")
    return DataLoader([found], batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type] # as a dataset


def forward_cutter(module: L.LightningModule, options: PipelineOptions, sizes: ParallelSizes) -> ModelCutter:
    """Cuts a module by its ``forward`` on its ``example_input_array``, for lack of a batch.

    Raises:
        UserError: The module has none.
    """
    inputs = getattr(module, "example_input_array", None)
    if inputs is None:
        raise UserError(
            f"{type(module).__name__} has no batch to run with. Give --batch my_package.my_module:make_batch (a "
            "function that returns one, a DataLoader or a LightningDataModule), or define train_dataloader() or "
            "example_input_array"
        )
    if is_overridden("configure_model", module):
        with parameters_without_memory():
            module.configure_model()

    microbatches = split_batch(inputs, 1)
    data = microbatches[0].data

    def step(_: Any) -> Tensor:
        if isinstance(data, dict):
            output = module(**data)
        else:
            output = module(*data) if isinstance(data, tuple) else module(data)
        sums = [tensor.sum() for tensor in tensors_of(output) if tensor.requires_grad]
        if not sums:
            raise UserError(f"no output of {type(module).__name__}.forward depends on a trained parameter")
        return torch.stack([value.float() for value in sums]).sum()

    return ModelCutter(module, options, sizes, StepToCut(inputs, microbatches, step))
