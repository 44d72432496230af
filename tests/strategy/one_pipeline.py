"""A strategy that cuts batches and shares logs, metrics and outputs as a pipeline does, around an ordinary backward.

It stands for the pipeline strategy: every process computes the whole model on the batch of its replica, but only the
last stage's process may use its real values; the others leave their step halfway. So what they log can only come from
the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.messages import MessageLine
from lightning_pp.split.data.microbatch import split_batch
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.results.outputs import merge_outputs
from lightning_pp.strategy.results.reports import BatchReport, ReportedBatch


@contextmanager
def in_step(logs: StepLogs, module: pl.LightningModule, microbatch: int | None) -> Iterator[None]:
    """Around one step, which ``logs`` record."""
    with logs.installed(module):
        logs.begin(microbatch)
        try:
            yield
        finally:
            logs.end()


def report_of(line: MessageLine, logs: StepLogs, samples: list[int], weights: list[float] | None = None) -> BatchReport:
    """The report of a batch whose steps keep nothing on the module."""
    return BatchReport(
        line,
        logs,
        lambda outputs: (merge_outputs(outputs, samples, weights), []),
        batch=ReportedBatch(weights or [number / sum(samples) for number in samples], sum(samples)),
        device=torch.device("cpu"),
    )


class EndOfStage(BaseException):
    """Ends the step on a stage that is not the last."""


class Regression(pl.LightningModule):
    """A linear model; subclasses log. On a stage that is not the last, the model's call ends the step."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.lr = lr
        self.ends_here = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ends_here:
            raise EndOfStage
        return self.layer(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class OnePipelineStrategy(SingleDeviceStrategy):
    def __init__(self, num_microbatches: int, groups: ControlGroups | None = None) -> None:
        super().__init__(device="cpu")
        self.num_microbatches = num_microbatches
        self.groups = groups or ControlGroups()
        self.line = MessageLine(self.groups, torch.device("cpu"))

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.metrics = PipelineMetrics(self.lightning_module, self.groups)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            output = self._run(self.lightning_module.training_step, *args)
        # of no use for training in several processes, where the gradient would have to come from the last stage
        output["loss"] = output["loss"] + sum(p.sum() for p in self.lightning_module.parameters()) * 0
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run(self.lightning_module.validation_step, *args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run(self.lightning_module.test_step, *args)

    def _run(self, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        module, groups = self.lightning_module, self.groups
        microbatches = split_batch(batch, self.num_microbatches)
        weights, samples = [m.weight for m in microbatches], [m.num_samples for m in microbatches]
        logs = StepLogs()
        outputs: list[Any] = []
        self.metrics.attach()
        is_last = groups.is_last_stage
        report = report_of(self.line, logs, samples, weights)
        for index, microbatch in enumerate(microbatches):
            context = self.metrics.step() if is_last else self.metrics.suspended()
            with in_step(logs, module, index if is_last else None), context:
                if is_last:
                    outputs.append(step(microbatch.data, *args))
                else:
                    module.ends_here = True
                    try:
                        step(microbatch.data, *args)
                    except EndOfStage:
                        pass
                    finally:
                        module.ends_here = False
        if is_last:
            report.send(outputs)
        shared, _ = report.receive_and_apply(module, 0)
        self.line.drain()  # its groups serve others as well
        if shared is None or not outputs or not torch.is_grad_enabled():
            return shared
        losses = [output["loss"] if isinstance(output, dict) else output for output in outputs]
        loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        return {**shared, "loss": loss} if isinstance(shared, dict) else {"loss": loss}


class MemoryLogger(DummyLogger):
    """Keeps what Lightning logs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def save_dir(self) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Snapshots(pl.Callback):
    """Keeps the trainer's three views of the metrics after every batch and epoch."""

    def __init__(self) -> None:
        self.views: list[tuple[str, dict[str, dict[str, float]]]] = []

    def _take(self, moment: str, trainer: pl.Trainer) -> None:
        views = {
            "callback": trainer.callback_metrics,
            "logged": trainer.logged_metrics,
            "progress_bar": trainer.progress_bar_metrics,
        }
        self.views.append((moment, {view: {k: float(v) for k, v in m.items()} for view, m in views.items()}))

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take("train batch start", trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take("train batch", trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take("validation batch", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take("validation", trainer)

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._take("end", trainer)


def data(num_samples: int = 12, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.get_default_dtype())
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(num_samples, 1, generator=generator))


def loader(
    batch_size: int, num_samples: int = 12, seed: int = 0, replica: int = 0, num_replicas: int = 1
) -> DataLoader:
    """Batches of ``batch_size`` samples in order, of which a replica gets its contiguous share."""
    dataset = data(num_samples, seed)
    batches = [list(range(start, min(start + batch_size, num_samples))) for start in range(0, num_samples, batch_size)]
    share = [
        batch[replica * len(batch) // num_replicas : (replica + 1) * len(batch) // num_replicas] for batch in batches
    ]
    return DataLoader(dataset, batch_sampler=share)


def trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": MemoryLogger(),
        **options,
    }
    return pl.Trainer(strategy=strategy, **settings)


def grid(num_replicas: int, last_stage_rank: int) -> ControlGroups:
    """The control groups of this rank in a grid of ``num_replicas`` pipelines over all ranks."""
    pipeline_size = dist.get_world_size() // num_replicas
    pipelines = [list(range(i * pipeline_size, (i + 1) * pipeline_size)) for i in range(num_replicas)]
    places = [list(range(i, dist.get_world_size(), pipeline_size)) for i in range(pipeline_size)]
    groups: list[dist.ProcessGroup] = []
    for ranks in pipelines + places:
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            groups.append(group)
    return ControlGroups(groups[0], groups[1], last_stage_rank)


def assert_same(found: Any, expected: Any, tolerance: float = 1e-12, at: str = "") -> None:
    """Nested containers with the same structure, and numbers that agree to ``tolerance``."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{at}: {sorted(found)} != {sorted(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], tolerance, f"{at}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{at}: {len(found)} entries != {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, tolerance, f"{at}[{index}]")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance), f"{at}: {found} != {expected}"
    else:
        assert found == expected, f"{at}: {found} != {expected}"
