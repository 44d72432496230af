"""The private names of Lightning and torchmetrics that the strategy uses; nothing else in this layer uses any.

Tried with Lightning 2.6.4 to 2.6.6 and torchmetrics 1.9. Importing fails, and says which name is missing, where a
version has one no longer.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ThroughputMonitor, WeightAveraging
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as LayerSummaries
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_pp._private_names import private, private_of_instances

try:
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduced
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from lightning.pytorch.loops.prediction_loop import _PredictionLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
    from lightning.pytorch.trainer import trainer as _trainer_file
    from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
    from lightning.pytorch.trainer.call import _call_strategy_hook as call_strategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.connectors.data_connector import _check_dataloader_iterable as check_iterable
    from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource as DataLoaderSource
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader as request_dataloader
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
    from lightning.pytorch.utilities.exceptions import _TunerExitException as EndOfFit
except ImportError as error:
    raise ImportError(
        f"lightning_pp uses private names of Lightning, and Lightning {version('lightning')} has another set of them "
        f"({error}). It was tried with Lightning 2.6.4 to 2.6.6."
    ) from error

__all__ = [
    "NO_SYNC",
    "AutomaticOptimization",
    "DataLoaderSource",
    "EndOfFit",
    "NoOptimizer",
    "ResultCollection",
    "SubprocessScriptLauncher",
    "accumulates",
    "allow_compiled_modules",
    "averaging_options",
    "call_before_update",
    "call_hooks",
    "call_strategy",
    "check_iterable",
    "computing_locally",
    "data_source_of",
    "folder_of",
    "forget_computed",
    "give_device_mesh",
    "goes_through_loaders_in_turn",
    "hook_that_logs_kept",
    "init_process_group",
    "is_computing_for_batch",
    "keywords_for",
    "leave_samplers_alone",
    "logging_from",
    "names_of_metrics_kept",
    "note_sigterm",
    "optimizers_to_device",
    "reduced",
    "replace_link",
    "replace_search_for_last",
    "replace_signal_handling",
    "request_dataloader",
    "requeue_by_slurm",
    "results_of",
    "set_average",
    "set_trainer",
    "set_update_count",
    "set_value_on_batch",
    "synchronizes_layers",
    "throughputs_of",
    "trainer_of",
    "transferred_by_hook",
    "update_count",
    "value_on_batch",
]

_LIGHTNING = {"of": "lightning", "tried": "2.6.4 to 2.6.6"}
_TORCHMETRICS = {"of": "torchmetrics", "tried": "1.9"}

for _owner, _name in (
    (pl.LightningModule, "_on_before_batch_transfer"),
    (pl.Trainer, "_results"),
    (_trainer_file, "_verify_strategy_supports_compile"),
    (_SignalConnector, "_sigterm_notifier_fn"),
    (_SignalConnector, "_slurm_sigusr_handler_fn"),
    (_FitLoop, "_should_accumulate"),
    (_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    (ModelSummary, "_summary"),
    (LayerSummaries, "_get_summary_data"),
    (Precision, "_after_closure"),
    (ModelCheckpoint, "_link_checkpoint"),
    (ModelCheckpoint, "_find_last_checkpoints"),
    (ModelCheckpoint, "_ModelCheckpoint__resolve_ckpt_dir"),
    # what classes of this package override or call in their base classes
    *(
        (AutomaticOptimization, name)
        for name in ("_make_closure", "_make_step_fn", "_make_zero_grad_fn", "_training_step")
    ),
    (_SubprocessScriptLauncher, "_call_children_scripts"),
    *((Strategy, name) for name in ("_configure_launcher", "_reset_optimizers_and_schedulers")),
):
    private(_owner, _name, **_LIGHTNING)
for _kind, _name in (
    *((pl.LightningModule, name) for name in ("_trainer", "_current_fx_name", "_device_mesh", "_metric_attributes")),
    *((pl.Trainer, name) for name in ("_logger_connector", "_signal_connector", "_accelerator_connector")),
    *((kind, "_data_source") for kind in (_FitLoop, _EvaluationLoop, _PredictionLoop)),
    *((WeightAveraging, name) for name in ("_device", "_use_buffers", "_kwargs", "_average_model")),
    (_LoggerConnector, "_current_fx"),
    (_AcceleratorConnector, "_layer_sync"),
    (CombinedLoader, "_mode"),
    (Strategy, "_launcher"),
    (WandbLogger, "_log_model"),
    (LayerSummaries, "_layer_summary"),
):
    private_of_instances(_kind, _name, **_LIGHTNING)
private(Metric, "_filter_kwargs", **_TORCHMETRICS)
for _name in ("_forward_cache", "_to_sync", "_computed", "_should_unsync"):
    private_of_instances(Metric, _name, **_TORCHMETRICS)

# ``sync_dist_fn`` of what is in sync already
NO_SYNC: Callable[..., Any] = _Sync.no_op

# ---------------------------------------------------------------- module and trainer


class SubprocessScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, with a say in the command line of the processes that it starts."""

    def arguments_of_others(self) -> list[str]:
        """What follows the program's name; by default what this process was given."""
        return sys.argv[1:]

    def _call_children_scripts(self) -> None:
        arguments = sys.argv[1:]
        sys.argv[1:] = self.arguments_of_others()
        try:
            super()._call_children_scripts()
        finally:
            sys.argv[1:] = arguments


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer that ``module`` is attached to; None without one, where ``module.trainer`` raises."""
    return module._trainer


def set_trainer(module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Attaches ``module`` to ``trainer``, and not the modules in it, as setting ``module.trainer`` does."""
    module._trainer = trainer


def give_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Makes ``mesh`` what ``module.device_mesh`` is."""
    module._device_mesh = mesh


def allow_compiled_modules(allows: Callable[[Strategy], bool]) -> None:
    """Has all trainers take modules that ``torch.compile`` has compiled where ``allows(strategy)``; done once.

    Lightning allows that by the class of the strategy, before it tells the strategy of the run.
    """
    original = vars(_trainer_file)["_verify_strategy_supports_compile"]
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def verify(model: pl.LightningModule, strategy: Strategy) -> None:
        if not allows(strategy):
            original(model, strategy)

    vars(_trainer_file)["_verify_strategy_supports_compile"] = verify


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether gradients of the training batch under way are kept for a later update."""
    return trainer.fit_loop._should_accumulate()


def call_hooks(trainer: pl.Trainer, name: str, *args: Any) -> None:
    """Calls the hook ``name`` of the callbacks, then that of the module."""
    _call_callback_hooks(trainer, name, *args)
    _call_lightning_module_hook(trainer, name, *args)


def call_before_update(precision: Precision, function: Callable[[], object]) -> None:
    """Has ``precision`` call ``function()`` right before the optimizer's step: after hooks and clipping."""

    def after_closure(model: pl.LightningModule, optimizer: Any) -> None:
        type(precision)._after_closure(precision, model, optimizer)
        function()

    precision.__dict__["_after_closure"] = after_closure


def synchronizes_layers(trainer: pl.Trainer) -> bool:
    """Whether ``sync_batchnorm``, or a plugin like it, was asked for."""
    return trainer._accelerator_connector._layer_sync is not None


def replace_signal_handling(
    trainer: pl.Trainer,
    on_signal: Callable[[int, Any], None],
    on_requeue: Callable[[int, Any], None],
    before_batch: Callable[[], None],
) -> None:
    """Has signals call ``on_signal(number, frame)``, and training ``before_batch()`` before every batch.

    These signals are SIGTERM, and SIGUSR1 unless it has a handler. What Lightning takes for Slurm's word that the job
    is about to end calls ``on_requeue(number, frame)``. Lightning has a collective in each of these places.
    """
    connector = trainer._signal_connector

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        has_signal = hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread()
        if has_signal and signal.getsignal(signal.SIGUSR1) in (None, signal.SIG_DFL):
            signal.signal(signal.SIGUSR1, on_signal)

    connector.__dict__["_sigterm_notifier_fn"] = on_signal
    connector.__dict__["_slurm_sigusr_handler_fn"] = on_requeue
    connector.__dict__["register_signal_handlers"] = register
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = before_batch


def requeue_by_slurm(trainer: pl.Trainer) -> None:
    """What Lightning does at Slurm's signal: it saves a checkpoint, and has the job requeued; all ranks call it."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, cast(Any, None))


def note_sigterm(trainer: pl.Trainer) -> None:
    """Makes ``trainer.received_sigterm`` true."""
    trainer._signal_connector.received_sigterm = True


# ---------------------------------------------------------------- data


def leave_samplers_alone(trainer: pl.Trainer) -> None:
    """As ``Trainer(use_distributed_sampler=False)``."""
    trainer._accelerator_connector.use_distributed_sampler = False


def data_source_of(loop: Any) -> DataLoaderSource:
    """Where a loop gets its loader from."""
    source: DataLoaderSource = loop._data_source
    return source


def goes_through_loaders_in_turn(loader: CombinedLoader) -> bool:
    """Whether a batch comes from one of the loaders, and not from each of them."""
    return loader._mode == "sequential"


def transferred_by_hook(module: pl.LightningModule, batch: Any) -> Any:
    """What ``on_before_batch_transfer``, of the module or of its data module, makes of a batch."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


# ---------------------------------------------------------------- logs


def results_of(module: pl.LightningModule) -> ResultCollection | None:
    """What ``module.log`` writes to; None without a trainer, and outside of loops."""
    return None if module._trainer is None else module._trainer._results


@contextmanager
def logging_from(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Within, ``module.log`` takes its caller for ``hook``."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def names_of_metrics_kept(module: pl.LightningModule) -> Iterator[None]:
    """Afterwards ``module.log`` looks for metrics as before; it searches the module for them once."""
    before = module._metric_attributes
    try:
        yield
    finally:
        module._metric_attributes = before


@contextmanager
def hook_that_logs_kept(trainer: pl.Trainer) -> Iterator[None]:
    """Afterwards the trainer takes the hook that logged last for the one that it was before."""
    connector = trainer._logger_connector
    before = connector._current_fx
    try:
        yield
    finally:
        connector._current_fx = before


# ---------------------------------------------------------------- callbacks


def throughputs_of(callback: ThroughputMonitor) -> list[Any]:
    """What ``callback`` counts with, after its ``setup``."""
    return list(callback._throughputs.values())


def uploads_checkpoints(logger: WandbLogger) -> bool:
    """The argument ``log_model`` of ``logger``."""
    return bool(logger._log_model)


def replace_summary(callback: ModelSummary, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has ``callback`` summarize by ``make(original)(trainer, module)``, once however often it is asked for."""
    if "_summary" not in vars(callback):
        vars(callback)["_summary"] = make(callback._summary)


def summary_columns(summary: Any) -> list[tuple[str, list[str]]]:
    """The columns of Lightning's model summary: heading, and a cell for each layer."""
    columns: list[tuple[str, list[str]]] = summary._get_summary_data()
    return columns


def layer_names_of(summary: Any) -> list[str]:
    """The layers of Lightning's model summary, without the row of parameters of no layer."""
    return list(summary._layer_summary)


def replace_link(callback: ModelCheckpoint, link: Callable[[pl.Trainer, str, str], None]) -> None:
    """Has ``callback`` make links to checkpoints by ``link(trainer, filepath, linkpath)``."""
    vars(callback)["_link_checkpoint"] = link


def folder_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """The folder that ``callback`` saves to, before or after its ``setup``."""
    folder: str = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
    return folder


def replace_search_for_last(search: Callable[[ModelCheckpoint, pl.Trainer], set[str] | None]) -> None:
    """Has all callbacks find their last checkpoints by ``search`` where that returns any set; done once.

    The class is changed, since Lightning looks for the checkpoint before it tells a strategy of trainer and callbacks.
    """
    original = ModelCheckpoint._find_last_checkpoints
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def find(self: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
        found = search(self, trainer)
        return original(self, trainer) if found is None else found

    ModelCheckpoint._find_last_checkpoints = find  # type: ignore[method-assign]


def averaging_options(callback: WeightAveraging) -> dict[str, Any]:
    """What ``callback`` makes its :class:`~torch.optim.swa_utils.AveragedModel` with."""
    device = callback._device if isinstance(callback._device, torch.device) else None
    return {"device": device, "use_buffers": callback._use_buffers, **callback._kwargs}


def set_average(callback: WeightAveraging, average: AveragedModel) -> None:
    """Has ``callback`` keep its average in ``average``."""
    callback._average_model = average


# ---------------------------------------------------------------- torchmetrics


def value_on_batch(metric: Metric) -> Any:
    """What the last ``forward`` of ``metric`` returned; None after an ``update``."""
    return metric._forward_cache


def set_value_on_batch(metric: Metric, value: Tensor) -> None:
    """Makes ``value`` what the last ``forward`` of ``metric`` returned."""
    metric._forward_cache = value  # type: ignore[assignment] # torchmetrics says None


def is_computing_for_batch(metric: Metric) -> bool:
    """Whether ``compute`` is called by ``forward``, for the value on the batch."""
    return not metric._should_unsync


def forget_computed(metric: Metric) -> None:
    """Has the next ``compute`` of ``metric`` compute again."""
    metric._computed = None


@contextmanager
def computing_locally(metric: Metric) -> Iterator[None]:
    """Within, ``compute`` does not sync ``metric``; what it gave is not kept for later calls."""
    before, metric._to_sync = metric._to_sync, False
    try:
        yield
    finally:
        metric._to_sync = before
        forget_computed(metric)


def update_count(metric: Metric) -> int:
    """How often ``metric`` was updated since its reset."""
    return metric._update_count


def set_update_count(metric: Metric, count: int) -> None:
    """Makes ``metric`` one that was updated ``count`` times."""
    if count != metric._update_count:
        metric._update_count = count
        forget_computed(metric)


def keywords_for(metric: Metric, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``keywords`` that ``update`` of ``metric`` takes."""
    return metric._filter_kwargs(**keywords)
