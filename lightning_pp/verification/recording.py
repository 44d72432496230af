"""One training that writes down all that is compared: in a process of its own, plain or as one rank of a pipeline."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pp.checkpoint.content import MODEL, OPTIMIZERS
from lightning_pp.checkpoint.reading.open import read_alone
from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.strategy.step.loader_state import own_draws, set_own_draws

TRAINING, RESUMED = "training", "resumed training"
FLOAT64 = "64-true"


@dataclass(frozen=True)
class Job:
    """What to train, and how.

    Attributes:
        parts: Pickled: module, datamodule, strategy and callbacks, each as it is or as a function that makes it.
        steps: Training batches before the checkpoint, and after it.
        seed: Of the parts that are made, and of each training.
        trainer: Arguments of the Trainer.
        num_processes: 1 for the training on one device, without the strategy.
        folder: Where the run writes.
    """

    parts: bytes
    steps: int
    seed: int
    trainer: Mapping[str, Any]
    num_processes: int
    folder: Path


@dataclass
class Facts:
    """What the comparison has to know of a run, besides its values.

    Attributes:
        num_moments: Moments that were written down.
        num_without_dropout: Modules whose dropout was set to 0.
        draws: Whether a batch of training or validation moved torch's generator.
        loss_dtype: Of the first loss.
        stages: Of this rank; on one device there are none.
        warnings: Their texts, each once.
    """

    num_moments: int = 0
    num_without_dropout: int = 0
    draws: bool = False
    loss_dtype: torch.dtype | None = None
    stages: str = ""
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Moment:
    """What one rank had at one moment.

    Attributes:
        place: ``"training, batch_idx=2"``.
        values: For each kind of value, the values by name.
    """

    place: str
    values: dict[str, dict[str, Any]]


def train_twice(job: Job, rank: int) -> Facts:
    """Trains, validates, saves a checkpoint, and does so again from this checkpoint with parts made anew."""
    facts, draws = Facts(), list[list[Any]]()
    path = job.folder / "resume.ckpt"
    for phase, ckpt_path in ((TRAINING, None), (RESUMED, path)):
        L.seed_everything(job.seed, workers=True, verbose=False)
        module, data, strategy, callbacks = (made(part) for part in pickle.loads(job.parts))
        facts.num_without_dropout = without_dropout(module)
        if job.trainer["precision"] == FLOAT64:
            module.double()  # Lightning loads a checkpoint before it converts the module, through float32
        recorder = Recorder(job.folder, rank, phase, facts, job.seed, draws)
        trainer = _trainer(job, strategy, [*kept(callbacks or []), recorder], num_epochs=1 + (phase == RESUMED))
        L.seed_everything(job.seed, workers=True, verbose=False)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
        trainer.save_checkpoint(path)
        recorder.note_end(trainer, path)
    return facts


def _trainer(job: Job, strategy: Any, callbacks: list[L.Callback], num_epochs: int) -> L.Trainer:
    trainer = L.Trainer(
        **{"limit_val_batches": 2, **job.trainer},
        accelerator="cpu",
        devices=job.num_processes,
        strategy=strategy if job.num_processes > 1 else "auto",
        callbacks=callbacks,
        max_epochs=num_epochs,
        limit_train_batches=job.steps,
        num_sanity_val_steps=0,
        logger=_SilentLogger(job.folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    if job.num_processes > 1:
        if not isinstance(strategy, PipelineParallelStrategy):
            raise ConfigurationError(f"strategy={type(strategy).__name__} is not a PipelineParallelStrategy.")
        if strategy.sizes.tensor > 1:
            raise ConfigurationError("Comparing ranks needs whole parameters. Set tensor_parallel_size=1.")
        if strategy.sizes.data_parallel > 1:
            raise ConfigurationError(
                f"{job.num_processes} processes and pipeline_parallel_size={strategy.sizes.pipeline} make "
                f"{strategy.sizes.data_parallel} replicas, each with batches of its own. Compare one pipeline: "
                "data_parallel_size=1, and as many devices as pipeline_parallel_size."
            )
    return trainer


class _SilentLogger(DummyLogger):
    """Writes nothing. Modules and callbacks may need a logger: ``Trainer()`` has one by default."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    @property
    def save_dir(self) -> str:
        return self._folder


def made(part: Any) -> Any:
    """A part as it is, or what the function (or class) makes that was given for it."""
    is_ready = isinstance(part, (nn.Module, L.LightningDataModule, Strategy, list, tuple))
    return part() if callable(part) and not is_ready else part


def kept(callbacks: list[L.Callback]) -> list[L.Callback]:
    """Without those that save or measure, whose states are names of files and times."""
    return [c for c in callbacks if not isinstance(c, Checkpoint) and not type(c).__module__.startswith("lightning_pp")]


def without_dropout(module: nn.Module) -> int:
    """Sets dropout to 0: of torch's modules, and numbers between 0 and 1 in attributes called so; in how many."""
    changed = 0
    for part in module.modules():
        is_dropout = "Dropout" in type(part).__name__
        names = [name for name in vars(part) if "dropout" in name or (is_dropout and name == "p")]
        found = {name: value for name in names if isinstance(value := vars(part)[name], float) and 0 < value < 1}
        vars(part).update(dict.fromkeys(found, 0.0))
        changed += bool(found)
    return changed


def _loaders(trainer: L.Trainer) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader).flattened)


def _in_order(tensor: Tensor) -> float:
    """A sum that another order of the elements makes another."""
    values = tensor.detach().double().flatten()
    return float(values @ torch.linspace(1, 2, len(values), dtype=values.dtype))


class Recorder(L.Callback):
    """Writes down what this rank has, batch by batch.

    Args:
        folder: Of the run: files of ranks in ``RANK/``, the checkpoint of all ranks beside these.
        rank: This process.
        phase: What the training is called.
        facts: To be filled.
        seed: Of the resumed epoch: a pipeline has the random state of its checkpoint, which one device does not keep.
        draws: Nor does it keep the generators that loaders hold: their states go from one training to the next in here.
    """

    def __init__(self, folder: Path, rank: int, phase: str, facts: Facts, seed: int, draws: list[list[Any]]) -> None:
        self._folder, self._rank, self._phase, self._facts = folder, rank, phase, facts
        self._seed, self._draws = seed, draws
        self._gradients: dict[str, Any] = {}
        self._batch: dict[str, Any] = {}
        self._generator = torch.get_rng_state()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(strategy := trainer.strategy, PipelineParallelStrategy):
            stages = strategy.engine.placement.stages_of_rank(strategy.pipeline_rank)
            self._facts.stages = ", ".join(map(str, stages))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._phase == RESUMED:
            L.seed_everything(self._seed, workers=True, verbose=False)
            for loader, states in zip(_loaders(trainer), self._draws, strict=False):
                set_own_draws(loader, states)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draws[:] = map(own_draws, _loaders(trainer))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = {name: _in_order(leaf) for name, leaf in leaves(batch, "batch") if isinstance(leaf, Tensor)}
        self._generator = torch.get_rng_state()

    def on_validation_batch_start(self, *_: Any) -> None:
        self._generator = torch.get_rng_state()

    def on_validation_batch_end(self, *_: Any) -> None:
        self._facts.draws |= not torch.equal(self._generator, torch.get_rng_state())

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._gradients |= {
            name: None if parameter.grad is None else whole(parameter.grad)
            for name, parameter in pl_module.named_parameters(remove_duplicate=False)
        }

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._facts.draws |= not torch.equal(self._generator, torch.get_rng_state())
        loss = dict(leaves(outputs, "loss" if isinstance(outputs, Tensor) else "")).get("loss")
        if self._facts.loss_dtype is None and isinstance(loss, Tensor):
            self._facts.loss_dtype = loss.dtype
        rates = {
            f"lr of optimizer {number}, group {place}": group["lr"]
            for number, optimizer in enumerate(trainer.optimizers)
            for place, group in enumerate(optimizer.param_groups)
        }
        logged, gradients, self._gradients = dict(trainer.callback_metrics), self._gradients, {}
        values: Any = {
            "batch": self._batch,
            "loss": {"loss": loss},
            "logged": logged,
            "gradient": gradients,
            "learning rate": rates,
        }
        self._write(f"{self._phase}, batch_idx={batch_idx}", {**values, **_state(trainer, pl_module)})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(f"validation of the {self._phase}", {"logged": dict(trainer.callback_metrics)})

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(f"end of the epoch of the {self._phase}", {"logged": dict(trainer.callback_metrics)})

    def note_end(self, trainer: L.Trainer, checkpoint: Path) -> None:
        """After the training, what the callbacks would save, and on rank 0 what the checkpoint has."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
        states = {
            f"{type(callback).__name__}{place}": value
            for callback in callbacks
            if not isinstance(callback, Checkpoint)
            for place, value in leaves(callback.state_dict(), "")
        }
        saved = read_alone(checkpoint, weights_only=False) if self._rank == 0 else {}
        kept = dict(leaves({key: saved[key] for key in (MODEL, OPTIMIZERS) if key in saved}, ""))
        self._write(f"end of the {self._phase}", {"state of a callback": states, "checkpoint": kept})

    def _write(self, place: str, values: dict[str, dict[str, Any]]) -> None:
        on_host = {kind: {name: whole(value) for name, value in each.items()} for kind, each in values.items()}
        path = moment_file(self._folder, self._rank, self._facts.num_moments)
        path.parent.mkdir(exist_ok=True)
        torch.save(Moment(place, on_host), path)
        self._facts.num_moments += 1


def _state(trainer: L.Trainer, module: L.LightningModule) -> dict[str, dict[str, Any]]:
    """Weights, buffers and optimizer states of this rank by name. Of buffers those that it would save."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    held = {**dict(module.named_buffers(remove_duplicate=False)), **module.state_dict()}
    others = [name for name in held if name not in parameters]
    if isinstance(strategy := trainer.strategy, PipelineParallelStrategy):
        split = strategy.engine.split
        others = [name for name in others if strategy.pipeline_rank in split.ranks_of(name)]
    states = {
        name: optimizer.state[parameter]
        for name, parameter in parameters.items()
        for optimizer in trainer.optimizers
        if parameter in optimizer.state
    }
    parts = {"weight": parameters, "buffer": {name: held[name] for name in others}, "optimizer state": states}
    return {kind: dict(place for name in each for place in leaves(each[name], name)) for kind, each in parts.items()}


def moment_file(folder: Path, rank: int, number: int) -> Path:
    """Where a rank writes its values of a moment."""
    return folder / f"rank{rank}" / f"{number:04d}.pt"


def whole(value: Any) -> Any:
    """A copy of a value; a tensor on the CPU, put together from its shards."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()


def leaves(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers, words and None of nested dicts, lists and tuples, by place; other objects are left out."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, f"{place}.{name}" if place else str(name))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{place}[{number}]")
    elif tree is None or isinstance(tree, (Tensor, int, float, str)):
        yield place, tree
