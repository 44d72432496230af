"""The private names of Lightning and torchmetrics that the strategy uses; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use. Names that classes of this package override
are checked when a strategy is made (:func:`check_overridden_names`), since nothing would call them if they moved.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ThroughputMonitor, WeightAveraging
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import trainer as _trainer_file
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_pp._private_names import private, reader_of, require, uses

_PYTORCH = "lightning.pytorch"
_LOOPS = f"{_PYTORCH}.loops"
_CONNECTORS = f"{_PYTORCH}.trainer.connectors"
_RESULTS = f"{_CONNECTORS}.logger_connector.result"

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
    from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource as DataLoaderSource
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from lightning.pytorch.utilities.exceptions import _TunerExitException as EndOfFit
else:
    NoOptimizer = private(f"{_PYTORCH}.core.optimizer._MockOptimizer")
    AutomaticOptimization = private(f"{_LOOPS}.optimization.automatic._AutomaticOptimization")
    _SubprocessScriptLauncher = private(f"{_PYTORCH}.strategies.launchers._SubprocessScriptLauncher")
    DataLoaderSource = private(f"{_CONNECTORS}.data_connector._DataLoaderSource")
    ResultCollection = private(f"{_RESULTS}._ResultCollection")
    EndOfFit = private(f"{_PYTORCH}.utilities.exceptions._TunerExitException")

init_process_group: Callable[..., None] = private("lightning.fabric.utilities.distributed._init_dist_connection")
reduced: Callable[..., Any] = private("lightning.fabric.utilities.distributed._sync_ddp_if_available")
optimizers_to_device: Callable[..., None] = private("lightning.fabric.utilities.optimizer._optimizers_to_device")
call_strategy: Callable[..., Any] = private(f"{_PYTORCH}.trainer.call._call_strategy_hook")
check_iterable: Callable[..., None] = private(f"{_CONNECTORS}.data_connector._check_dataloader_iterable")
request_dataloader: Callable[..., Any] = private(f"{_CONNECTORS}.data_connector._request_dataloader")
_resolve_overfit_batches: Callable[..., None] = private(f"{_CONNECTORS}.data_connector._resolve_overfit_batches")
_call_callback_hooks: Callable[..., None] = private(f"{_PYTORCH}.trainer.call._call_callback_hooks")
_call_lightning_module_hook: Callable[..., Any] = private(f"{_PYTORCH}.trainer.call._call_lightning_module_hook")
# the trainer that a module is attached to; None without one, where ``module.trainer`` raises
trainer_of: Callable[[pl.LightningModule], pl.Trainer | None] = reader_of("lightning.pytorch.LightningModule._trainer")
# the loop whose batches the trainer runs just now
active_loop: Callable[[pl.Trainer], Any] = reader_of("lightning.pytorch.Trainer._active_loop")
# the argument ``log_model`` of a logger of W&B
uploads_checkpoints: Callable[[WandbLogger], object] = reader_of("lightning.pytorch.loggers.WandbLogger._log_model")
# by stage what the callback counts with, after its ``setup``
throughputs_of: Callable[[ThroughputMonitor], Mapping[Any, Any]] = reader_of(
    "lightning.pytorch.callbacks.ThroughputMonitor._throughputs"
)
# what the last ``forward`` of a metric returned; None after an ``update``
value_on_batch: Callable[[Metric], Any] = reader_of("torchmetrics.Metric._forward_cache")
# by name of a state of a metric, how those of several processes become one; None: they are stacked
reductions_of: Callable[[Metric], Mapping[str, Callable[[Any], Any] | None]] = reader_of(
    "torchmetrics.Metric._reductions"
)
# how often a metric was updated since its reset
update_count: Callable[[Metric], int] = reader_of("torchmetrics.Metric._update_count")

# of these alone type checkers see an import, which they do not take for a name of this file
__all__ = ["AutomaticOptimization", "DataLoaderSource", "EndOfFit", "NoOptimizer", "ResultCollection"]


def check_overridden_names() -> None:
    """Checks that Lightning still has the private methods that classes of this package override.

    Raises:
        ImportError: It has one of them no longer.
    """
    optimization = f"{_LOOPS}.optimization.automatic._AutomaticOptimization"
    require(
        *(f"{optimization}.{name}" for name in ("_make_closure", "_make_step_fn", "_make_zero_grad_fn")),
        f"{optimization}._training_step",
        f"{_PYTORCH}.strategies.launchers._SubprocessScriptLauncher._call_children_scripts",
        f"{_PYTORCH}.strategies.Strategy._configure_launcher",
        f"{_PYTORCH}.strategies.Strategy._reset_optimizers_and_schedulers",
        f"{_PYTORCH}.plugins.precision.Precision._after_closure",
        f"{_CONNECTORS}.signal_connector._SignalConnector._sigterm_notifier_fn",
        f"{_CONNECTORS}.signal_connector._SignalConnector._slurm_sigusr_handler_fn",
        f"{_LOOPS}.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
        *(f"{_PYTORCH}.callbacks.ModelCheckpoint.{name}" for name in ("_link_checkpoint", "_find_last_checkpoints")),
        f"{_PYTORCH}.callbacks.ModelSummary._summary",
    )


# ``sync_dist_fn`` of what is in sync already
NO_SYNC: Callable[..., Any] = private(f"{_RESULTS}._Sync.no_op")

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


@uses("lightning.pytorch.LightningModule._trainer")
def set_trainer(module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Attaches ``module`` to ``trainer``, and not the modules in it, as setting ``module.trainer`` does."""
    module._trainer = trainer


@uses("lightning.pytorch.LightningModule._device_mesh")
def give_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Makes ``mesh`` what ``module.device_mesh`` is."""
    module._device_mesh = mesh


@uses("lightning.pytorch.trainer.trainer._verify_strategy_supports_compile")
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


@uses("lightning.pytorch.loops.fit_loop._FitLoop._should_accumulate")
def accumulates(trainer: pl.Trainer) -> bool:
    """Whether gradients of the training batch under way are kept for a later update."""
    return trainer.fit_loop._should_accumulate()


def call_hooks(trainer: pl.Trainer, name: str, *args: Any) -> None:
    """Calls the hook ``name`` of the callbacks, then that of the module."""
    _call_callback_hooks(trainer, name, *args)
    _call_lightning_module_hook(trainer, name, *args)


@uses("lightning.pytorch.plugins.precision.Precision._after_closure")
def call_before_update(precision: Precision, function: Callable[[], object]) -> None:
    """Has ``precision`` call ``function()`` right before the optimizer's step: after hooks and clipping."""

    def after_closure(model: pl.LightningModule, optimizer: Any) -> None:
        type(precision)._after_closure(precision, model, optimizer)
        function()

    precision.__dict__["_after_closure"] = after_closure


@uses(
    "lightning.pytorch.Trainer._accelerator_connector",
    f"{_CONNECTORS}.accelerator_connector._AcceleratorConnector._layer_sync",
)
def synchronizes_layers(trainer: pl.Trainer) -> bool:
    """Whether ``sync_batchnorm``, or a plugin like it, was asked for."""
    return trainer._accelerator_connector._layer_sync is not None


@uses("lightning.pytorch.Trainer._signal_connector")
def replace_signal_handling(
    trainer: pl.Trainer,
    on_signal: Callable[[int, Any], None],
    on_requeue: Callable[[int, Any], None],
    before_batch: Callable[[], None],
    when_registered: Callable[[set[int]], None],
) -> None:
    """Has signals call ``on_signal(number, frame)``, and training ``before_batch()`` before every batch.

    These signals are SIGTERM, and SIGUSR1 unless it has a handler. What Lightning takes for Slurm's word that the job
    is about to end calls ``on_requeue(number, frame)``. Lightning has a collective in each of these places.
    ``when_registered`` gets the signals that call ``on_signal``, once they do.
    """
    connector = trainer._signal_connector

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        has_signal = hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread()
        if has_signal and signal.getsignal(signal.SIGUSR1) in (None, signal.SIG_DFL):
            signal.signal(signal.SIGUSR1, on_signal)
        is_own = has_signal and signal.getsignal(signal.SIGUSR1) == on_signal
        when_registered({signal.SIGTERM, *([signal.SIGUSR1] if is_own else [])})

    connector.__dict__["_sigterm_notifier_fn"] = on_signal
    connector.__dict__["_slurm_sigusr_handler_fn"] = on_requeue
    connector.__dict__["register_signal_handlers"] = register
    trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = before_batch


@uses("lightning.pytorch.Trainer._signal_connector")
def requeue_by_slurm(trainer: pl.Trainer) -> None:
    """What Lightning does at Slurm's signal: it saves a checkpoint, and has the job requeued; all ranks call it."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, cast(Any, None))


@uses("lightning.pytorch.Trainer._signal_connector")
def note_sigterm(trainer: pl.Trainer) -> None:
    """Makes ``trainer.received_sigterm`` true."""
    trainer._signal_connector.received_sigterm = True


# ---------------------------------------------------------------- data

_LOOP_CLASSES = ("fit_loop._FitLoop", "evaluation_loop._EvaluationLoop", "prediction_loop._PredictionLoop")


@uses("lightning.pytorch.Trainer._accelerator_connector")
def leave_samplers_alone(trainer: pl.Trainer) -> None:
    """As ``Trainer(use_distributed_sampler=False)``."""
    trainer._accelerator_connector.use_distributed_sampler = False


@uses(*(f"{_LOOPS}.{name}._data_source" for name in _LOOP_CLASSES))
def data_source_of(loop: Any) -> DataLoaderSource:
    """Where a loop gets its loader from."""
    source: DataLoaderSource = loop._data_source
    return source


@uses(f"{_LOOPS}.fit_loop._FitLoop._combined_loader", f"{_LOOPS}.fit_loop._FitLoop._data_source")
@contextmanager
def training_loaders_untouched(trainer: pl.Trainer) -> Iterator[None]:
    """Afterwards the loop asks for its loaders as before, also where the number of steps was asked for within."""
    loop = trainer.fit_loop
    source = vars(loop._data_source).copy()
    try:
        with _kept(loop, "_combined_loader"):
            yield
    finally:
        vars(loop._data_source).clear()
        vars(loop._data_source).update(source)


@uses(f"{_CONNECTORS}.data_connector._DataConnector._prepare_dataloader", "lightning.pytorch.Trainer._data_connector")
def prepare_for_training(trainer: pl.Trainer, loader: CombinedLoader) -> None:
    """Gives samplers of ``loader`` what Lightning will give them: this replica's part, or no shuffling to overfit."""
    if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
        _resolve_overfit_batches(loader, mode=RunningStage.TRAINING)
    prepare = trainer._data_connector._prepare_dataloader
    loader.flattened = [prepare(each, shuffle=True, mode=RunningStage.TRAINING) for each in loader.flattened]


@uses("lightning.pytorch.utilities.combined_loader.CombinedLoader._mode")
def goes_through_loaders_in_turn(loader: CombinedLoader) -> bool:
    """Whether a batch comes from one of the loaders, and not from each of them."""
    return loader._mode == "sequential"


@uses("lightning.pytorch.LightningModule._on_before_batch_transfer")
def transferred_by_hook(module: pl.LightningModule, batch: Any) -> Any:
    """What ``on_before_batch_transfer``, of the module or of its data module, makes of a batch."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


# ---------------------------------------------------------------- logs


@contextmanager
def _kept(owner: object, name: str) -> Iterator[None]:
    """Afterwards the attribute of ``owner`` is what it was before."""
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


@uses("lightning.pytorch.LightningModule._trainer", "lightning.pytorch.Trainer._results")
def results_of(module: pl.LightningModule) -> ResultCollection | None:
    """What ``module.log`` writes to; None without a trainer, and outside of loops."""
    return None if module._trainer is None else module._trainer._results


@uses("lightning.pytorch.Trainer._logger_connector", f"{_RESULTS}._ResultCollection.update_metrics")
def log_resolved(
    trainer: pl.Trainer,
    results: ResultCollection,
    hook: str,
    name: str,
    value: Tensor | Metric,
    batch_size: Any,
    options: dict[str, Any],
) -> None:
    """The end of ``module.log``, for a call that it has checked, with the ``options`` that it found; syncs nothing.

    A number that was logged with equal options before goes straight into its sum: ``results.log`` would take apart all
    that holds the sum, to move it to the device where it is.
    """
    connector = trainer._logger_connector
    if connector.should_reset_tensors(hook):  # in the first batch of an epoch
        results.reset(metrics=False, fx=hook)
    is_numbered = options["add_dataloader_idx"] and results.dataloader_idx is not None
    key = f"{hook}.{name}" + (f".{results.dataloader_idx}" if is_numbered else "")
    if key in results and results[key].is_tensor and vars(results[key]).get("_options") == options:
        results.update_metrics(key, value, batch_size)
    else:
        results.log(hook, name, value, batch_size=batch_size, sync_dist=True, sync_dist_fn=NO_SYNC, **options)
        vars(results[key])["_options"] = options
    connector._current_fx = hook


@uses("lightning.pytorch.LightningModule._LightningModule__to_tensor")
def noting_logged(module: pl.LightningModule, note: Callable[[Any], None]) -> dict[str, Callable[..., Tensor]]:
    """By name a method that Lightning's ``log`` calls for each value, also from a user's override, with ``note``."""
    to_tensor: Callable[..., Tensor] = vars(pl.LightningModule)["_LightningModule__to_tensor"]

    def noted(value: Any, name: str) -> Tensor:
        note(value)
        return to_tensor(module, value, name)

    return {"_LightningModule__to_tensor": noted}


@uses(
    "lightning.pytorch.Trainer._logger_connector",
    f"{_CONNECTORS}.logger_connector.logger_connector._LoggerConnector._current_fx",
)
def hook_that_logs_kept(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Afterwards the trainer takes the hook that logged last for the one that it was before."""
    return _kept(trainer._logger_connector, "_current_fx")


# ---------------------------------------------------------------- callbacks


@uses("lightning.pytorch.callbacks.ModelSummary._summary")
def replace_summary(callback: ModelSummary, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has ``callback`` summarize by ``make(original)(trainer, module)``, once however often it is asked for."""
    if "_summary" not in vars(callback):
        vars(callback)["_summary"] = make(callback._summary)


@uses("lightning.pytorch.utilities.model_summary.model_summary.ModelSummary._get_summary_data")
def summary_columns(summary: Any) -> list[tuple[str, list[str]]]:
    """The columns of Lightning's model summary: heading, and a cell for each layer."""
    columns: list[tuple[str, list[str]]] = summary._get_summary_data()
    return columns


@uses("lightning.pytorch.callbacks.ModelCheckpoint._link_checkpoint")
def replace_link(callback: ModelCheckpoint, link: Callable[[pl.Trainer, str, str], None]) -> None:
    """Has ``callback`` make links to checkpoints by ``link(trainer, filepath, linkpath)``."""
    vars(callback)["_link_checkpoint"] = link


@uses("lightning.pytorch.callbacks.ModelCheckpoint._ModelCheckpoint__resolve_ckpt_dir")
def folder_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """The folder that ``callback`` saves to, before or after its ``setup``."""
    folder: str = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
    return folder


@uses("lightning.pytorch.callbacks.ModelCheckpoint._find_last_checkpoints")
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


@uses(*(f"lightning.pytorch.callbacks.WeightAveraging.{name}" for name in ("_device", "_use_buffers", "_kwargs")))
def averaging_options(callback: WeightAveraging) -> dict[str, Any]:
    """What ``callback`` makes its :class:`~torch.optim.swa_utils.AveragedModel` with."""
    device = callback._device if isinstance(callback._device, torch.device) else None
    return {"device": device, "use_buffers": callback._use_buffers, **callback._kwargs}


@uses("lightning.pytorch.callbacks.WeightAveraging._average_model")
def set_average(callback: WeightAveraging, average: AveragedModel) -> None:
    """Has ``callback`` keep its average in ``average``."""
    callback._average_model = average


# ---------------------------------------------------------------- torchmetrics


@uses("torchmetrics.Metric._forward_cache")
def set_value_on_batch(metric: Metric, value: Tensor) -> None:
    """Makes ``value`` what the last ``forward`` of ``metric`` returned."""
    metric._forward_cache = value  # type: ignore[assignment] # torchmetrics says None


@uses("torchmetrics.Metric._should_unsync")
def is_computing_for_batch(metric: Metric) -> bool:
    """Whether ``compute`` is called by ``forward``, for the value on the batch."""
    return not metric._should_unsync


@uses("torchmetrics.Metric._computed")
def forget_computed(metric: Metric) -> None:
    """Has the next ``compute`` of ``metric`` compute again."""
    metric._computed = None


@uses("torchmetrics.Metric._to_sync")
@contextmanager
def computing_locally(metric: Metric) -> Iterator[None]:
    """In the block, ``compute`` does not sync ``metric``; what it gave is not kept for later calls."""
    with _kept(metric, "_to_sync"):
        metric._to_sync = False
        try:
            yield
        finally:
            forget_computed(metric)


@uses("torchmetrics.Metric._update_count")
def set_update_count(metric: Metric, count: int) -> None:
    """Makes ``metric`` one that was updated ``count`` times."""
    if count != metric._update_count:
        metric._update_count = count
        forget_computed(metric)


@uses("torchmetrics.Metric._filter_kwargs")
def keywords_for(metric: Metric, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``keywords`` that ``update`` of ``metric`` takes."""
    return metric._filter_kwargs(**keywords)


@uses("lightning.pytorch.loops.fit_loop._FitLoop._combined_loader")
def ask_for_loaders_again(trainer: pl.Trainer) -> None:
    """Has the training ask for its loaders when it begins, though something has asked for them before."""
    trainer.fit_loop._combined_loader = None
