"""The typed schema of every config group: an override that does not exist, or has the wrong type, fails at composition.

``_target_`` names what each group builds. Fields carry the defaults of what they build; the YAML files beside this one
hold only what differs. ``Any`` stands where OmegaConf has no type for what Lightning accepts (number, list, word).
What this package defines is not written here: :func:`conf_of` reads its arguments, defaults and help from the class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from lightning_pp.conf.fields import conf_of


class Mode(Enum):
    """Which Trainer method a run calls."""

    fit = "fit"
    validate = "validate"
    test = "test"
    predict = "predict"


@dataclass
class TrainerConf:
    """``lightning.pytorch.Trainer``; its strategy, logger and callbacks have groups of their own.

    Attributes:
        accelerator: Which kind of device: ``cpu``, ``gpu``, or ``auto`` for what there is.
        devices: How many devices of a node, a list of their numbers, or ``auto`` for all; with ``cpu`` how many
            processes.
        num_nodes: Machines that train together; each has as many devices.
        precision: In which numbers to compute: ``32-true``, ``64-true``, ``bf16-true``, ``bf16-mixed``, or ``16-mixed``
            on CUDA.
        fast_dev_run: true for one batch of each kind and no logger, to find mistakes; a number for as many.
        max_epochs: Epochs to train at most; -1 for no end; null for what ``max_steps`` says, or 1000 epochs without
            either.
        min_epochs: Epochs to train at least, whatever wants to stop earlier.
        max_steps: Optimizer steps to train at most, counted from the first of the training; -1 for no limit.
        min_steps: Optimizer steps to train at least.
        max_time: Wall-clock time to train at most, as ``DD:HH:MM:SS``.
        limit_train_batches: Training batches of an epoch: a number of them, or a share such as 0.1; null for all.
        limit_val_batches: The same of a validation.
        limit_test_batches: The same of a test.
        limit_predict_batches: The same of a prediction.
        overfit_batches: Train and validate on these few batches only: a number, or a share; 0.0 for all data.
        val_check_interval: When to validate: after this many batches, this share of an epoch, or a time
            ``DD:HH:MM:SS``; null for the end of the epoch.
        check_val_every_n_epoch: Epochs from one validation to the next; null where ``val_check_interval`` counts
            batches over epochs.
        num_sanity_val_steps: Validation batches before the training starts; -1 for all; null for 2.
        log_every_n_steps: Optimizer steps from one entry of the log to the next; null for 50.
        enable_checkpointing: Whether to save without a checkpoint callback as well, after each epoch; null for true.
        enable_progress_bar: Whether to show a progress bar; null for true.
        enable_model_summary: Whether to print a table of the model's parts; null for true.
        accumulate_grad_batches: Batches whose gradients are added up before an optimizer step.
        gradient_clip_val: Clip gradients to this norm, over all stages and shards, or to this value; null for no
            clipping.
        gradient_clip_algorithm: Clip by ``norm`` or by ``value``; null for ``norm``.
        deterministic: Whether operations must give the same bits each time; ``warn`` tells of those that cannot.
        benchmark: Whether cuDNN tries out which algorithm is fastest; null leaves it as it is.
        inference_mode: Whether evaluations run without what autograd keeps; several stages use ``no_grad`` in either
            case.
        use_distributed_sampler: Whether Lightning shares out the data over the data-parallel ranks; false where the
            loader does it.
        profiler: One of Lightning's profilers by name, ``simple`` or ``advanced``; for stages see the callback
            ``pipeline_profiler``.
        detect_anomaly: Whether autograd looks for the operation that made a NaN; slow.
        barebones: Turn off all that costs time beside training (logger, checkpoints, progress bar), to measure.
        plugins: Plugins of Lightning, as ``_target_`` or a list of them.
        sync_batchnorm: Refused by pipelines: statistics over all ranks of a layer that only some have.
        reload_dataloaders_every_n_epochs: Ask for the loaders again after this many epochs; 0 for never.
        default_root_dir: Folder of what no logger or callback has a place for; null for the current one.
        enable_autolog_hparams: Whether loggers get the hyper-parameters that the module and the data have saved.
        model_registry: Name under which Lightning uploads the model to its model hub; null for no upload.
    """

    _target_: str = "lightning.pytorch.Trainer"
    accelerator: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = "32-true"
    fast_dev_run: Any = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    overfit_batches: Any = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: Any = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Any = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str | None = None
    enable_autolog_hparams: bool = True
    model_registry: str | None = None


@dataclass
class LocalLauncherConf:
    """The command starts the processes that ``trainer.devices`` asks for, unless a launcher has started it.

    Attributes:
        name: Who starts the processes: ``local``, or ``torchrun``.
    """

    name: str = "local"


@dataclass
class TorchrunConf:
    """``torchrun``, started by the command in its own place; nothing is done where a launcher has started the command.

    Attributes:
        name: Who starts the processes: ``torchrun``, or ``local``.
        max_restarts: How often all processes are started again after one has failed; the run goes on from its newest
            checkpoint.
        rdzv_endpoint: With ``trainer.num_nodes`` above 1, ``HOST:PORT`` of one of the nodes, the same on all of them.
        rdzv_id: With several nodes, a name of the job, the same on all of them.
        options: More options of torchrun, such as ``[--log-dir,logs]``.
    """

    name: str = "torchrun"
    max_restarts: int = 0
    rdzv_endpoint: str | None = None
    rdzv_id: str = "lightning_pp"
    options: list[str] = field(default_factory=list)


@dataclass
class TimeoutConf:
    """How long a collective or a message may take before the job is given up.

    Attributes:
        seconds: null: ten minutes over NCCL, half an hour over gloo, as torch has it.
    """

    _target_: str = "lightning_pp.conf.builders.timeout"
    seconds: float | None = None


PipelineParallelStrategyConf = conf_of(
    "lightning_pp.PipelineParallelStrategy", {"timeout": ("TimeoutConf", TimeoutConf)}
)
# of a typed mapping that is null nothing can be set
_CONFIG = {"config": ("dict[str, Any]", dict)}
ByteGPTConf = conf_of("lightning_pp.recipes.byte_gpt.ByteGPT")
CausalLMConf = conf_of("lightning_pp.recipes.causal_lm.CausalLM", _CONFIG)
Seq2SeqLMConf = conf_of("lightning_pp.recipes.seq2seq.Seq2SeqLM", _CONFIG)
ImageClassifierConf = conf_of("lightning_pp.recipes.images.ImageClassifier", _CONFIG)
TwoTowerConf = conf_of("lightning_pp.recipes.two_tower.TwoTower")


@dataclass
class AdamWConf:
    """``torch.optim.AdamW``, which the model calls with its parameters and learning rate.

    Attributes:
        betas: Decay of the first and of the second moments.
        eps: Is added to the root of the second moments.
        fused: One kernel for all; null is torch's choice.
        foreach: A few kernels over all parameters; null is torch's choice.
    """

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    fused: bool | None = None
    foreach: bool | None = None


@dataclass
class SGDConf:
    """``torch.optim.SGD``, which the model calls with its parameters and learning rate.

    Attributes:
        momentum: Decay of the moving average of gradients.
        nesterov: Look ahead by the momentum.
    """

    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    momentum: float = 0.9
    nesterov: bool = False


@dataclass
class AdafactorConf:
    """``torch.optim.Adafactor``, which the model calls with its parameters and learning rate.

    Attributes:
        beta2_decay: By which power of the step the decay of second moments comes to 1.
        d: Largest root mean square of an update.
    """

    _target_: str = "torch.optim.Adafactor"
    _partial_: bool = True
    beta2_decay: float = -0.8
    d: float = 1.0


ByteTextDataModuleConf = conf_of("lightning_pp.recipes.byte_text.ByteTextDataModule")
SpanCorruptionDataModuleConf = conf_of(
    "lightning_pp.recipes.seq2seq.SpanCorruptionDataModule", base=ByteTextDataModuleConf
)
TokenDataModuleConf = conf_of("lightning_pp.recipes.tokens.TokenDataModule")
StreamDataModuleConf = conf_of("lightning_pp.recipes.streams.StreamDataModule")
ImageDataModuleConf = conf_of("lightning_pp.recipes.images.ImageDataModule")


@dataclass
class WandbConf:
    """``lightning_pp.PipelineWandbLogger``; what it does not name goes to ``wandb.init``.

    Attributes:
        name: Name that W&B shows for the run; null for one that it makes up.
        save_dir: Folder in which wandb makes its own.
        version: Id of the run, by which it goes on.
        id: The same as ``version``. ``resume=FOLDER`` of the command fills it in.
        resume: What wandb does where a run of this id is there already.
        offline: Whether the run stays on this machine until ``wandb sync``.
        project: W&B project of the run.
        entity: W&B user or team that owns the project; null for the user's default.
        group: The runs of a sweep have the sweep's folder for one, unless this says another.
        job_type: What kind of run this is, for W&B to sort by.
        tags: Words for W&B to filter runs by.
        notes: Text about the run.
        prefix: Stands before the name of every metric.
        log_model: Checkpoints as artifacts: true for those at the end, ``all`` for each once it is written.
        log_model_as: ``files`` for a copy at W&B, ``reference`` for the place alone.
        every_node: Whether the system metrics of all nodes are in the run; needs ``offline: false``.
    """

    _target_: str = "lightning_pp.PipelineWandbLogger"
    name: str | None = None
    save_dir: str = MISSING
    version: str | None = None
    id: str | None = None
    resume: str | None = "allow"
    offline: bool = True
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    prefix: str = ""
    log_model: Any = False
    log_model_as: str = "files"
    every_node: bool = False


@dataclass
class CSVLoggerConf:
    """``lightning.pytorch.loggers.CSVLogger``.

    Attributes:
        save_dir: Folder of the logs.
        name: Folder in ``save_dir``; null for ``save_dir`` itself.
        version: Folder in that; null for the next ``version_N``.
        prefix: Stands before the name of every metric.
        flush_logs_every_n_steps: Steps from one write of the file to the next.
    """

    _target_: str = "lightning.pytorch.loggers.CSVLogger"
    save_dir: str = MISSING
    name: str | None = "csv"
    version: Any = None
    prefix: str = ""
    flush_logs_every_n_steps: int = 100


@dataclass
class CheckpointConf:
    """``lightning.pytorch.callbacks.ModelCheckpoint``.

    Attributes:
        dirpath: Folder or URL of the checkpoints.
        filename: Name of a checkpoint, with metrics such as ``{step}`` or ``{val_loss:.2f}``; null for epoch and step.
        monitor: Metric that decides which checkpoints are the best; null for the latest.
        mode: Whether the best is the ``min`` or the ``max`` of that metric.
        save_last: Whether the newest is also saved as ``last.ckpt``; ``link`` for a link to it.
        save_top_k: How many of the best to keep; -1 for all, 0 for none.
        save_weights_only: Whether the optimizer and the progress are left out; such a checkpoint cannot be resumed
            from.
        auto_insert_metric_name: Whether names of metrics stand before their values in ``filename``.
        every_n_train_steps: Optimizer steps from one save to the next.
        every_n_epochs: Epochs from one save to the next.
        save_on_train_epoch_end: Save at the end of a training epoch (true) or of a validation (false); null for what
            fits the trainer.
        verbose: Whether each save is told.
    """

    _target_: str = "lightning.pytorch.callbacks.ModelCheckpoint"
    dirpath: str = MISSING
    filename: str | None = None
    monitor: str | None = None
    mode: str = "min"
    save_last: Any = None
    save_top_k: int = 1
    save_weights_only: bool = False
    auto_insert_metric_name: bool = True
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    save_on_train_epoch_end: bool | None = None
    verbose: bool = False


PipelineMonitorConf = conf_of("lightning_pp.PipelineMonitor")
PipelineProfilerConf = conf_of("lightning_pp.PipelineProfiler")
MemorySnapshotsConf = conf_of("lightning_pp.MemorySnapshots")
PredictionWriterConf = conf_of("lightning_pp.callbacks.PredictionWriter")


@dataclass
class RunConf:
    """One run: what to build, from which groups, and what to do with it.

    Attributes:
        mode: Which Trainer method is called.
        ckpt_path: Checkpoint that a fit goes on from, and whose weights other modes load; ``initial``: the model's own
            weights.
        seed: Of the random numbers of weights and data.
        trainer: What the group ``trainer`` gives.
        strategy: What the group ``strategy`` gives, with that of ``schedule`` in it.
        model: What the group ``model`` gives, with that of ``optimizer`` in it.
        data: What the group ``data`` gives.
        logger: What the group ``logger`` gives.
        callbacks: What the group ``callbacks`` gives, by name.
        launcher: What the group ``launcher`` gives; for ``lightning-pp`` alone.
    """

    mode: Mode = Mode.fit
    ckpt_path: str | None = None
    seed: int = 0
    trainer: Any = MISSING
    strategy: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    logger: Any = MISSING
    callbacks: dict[str, Any] = field(default_factory=dict)
    launcher: Any = None


@dataclass
class CommandConf(RunConf):
    """What ``lightning-pp`` is asked, besides what a run is.

    Attributes:
        resume: Folder of a run to go on with, from its newest checkpoint; ``auto``: that of ``hydra.run.dir``, if it
            has saved something.
    """

    resume: str | None = None


@dataclass
class PlanConf(RunConf):
    """What ``lightning-pp-plan`` is asked, besides what a run is.

    Attributes:
        check: Only whether the module can be cut.
        search: Compare all plans for the devices: sizes, microbatches, schedules, sharding, activation checkpointing.
        samples_per_step: With ``search``, samples of all replicas in a step; null for those that are configured.
        batch_size_key: With ``search``, where the configuration has the samples of one replica's batch.
        costs: JSON file of measured costs; null: they are estimated from FLOPs and bytes.
        measure: Whether each distinct unit runs alone on the present device, and costs are those times.
        measure_seconds: How long that may take altogether; each distinct unit runs once in any case.
        device: Device to estimate for, by a name such as ``h100 sxm``.
        peak_tflops: What a device can do at most, in TFLOP/s, in place of what is known of ``device``.
        efficiency: Share of that which is reached.
        links: JSON file of ``lightning-pp-doctor``, whose figures count before those that follow; null for none.
        link_gb_per_s: GB/s between two nodes.
        link_latency_us: Microseconds that a message between two nodes takes besides its bytes.
        node_link_gb_per_s: GB/s between two ranks of a node; null for what is known of ``device``, or else
            ``link_gb_per_s``.
        node_link_latency_us: Microseconds that a message between two ranks of a node takes besides its bytes.
        devices_per_node: Devices of a node; null for those of ``trainer.num_nodes``, and at most 8 where that is 1.
        memory_gb_per_s: GB/s of a device's memory that are reached; null: 0.8 of what is known of ``device``.
        device_memory_gib: The most GiB that a rank may hold, everything included; null for that of the strategy.
        schedules: Names of the schedules to compare; null for all.
        show: Schedule to draw and export: ``best``, ``configured`` or a name.
        out: Folder for ``plan.json``, the pictures and the CSV file; null for none.
    """

    check: bool = False
    search: bool = False
    samples_per_step: int | None = None
    batch_size_key: str = "data.batch_size"
    costs: str | None = None
    measure: bool = False
    measure_seconds: float = 10.0
    device: str | None = None
    peak_tflops: float | None = None
    efficiency: float = 0.4
    links: str | None = None
    link_gb_per_s: float = 25.0
    link_latency_us: float = 20.0
    node_link_gb_per_s: float | None = None
    node_link_latency_us: float = 10.0
    devices_per_node: int | None = None
    memory_gb_per_s: float | None = None
    device_memory_gib: float | None = None
    schedules: list[str] | None = None
    show: str = "best"
    out: str | None = None


@dataclass
class VerifyConf(RunConf):
    """What ``lightning-pp-verify`` is asked, besides what a run is.

    Attributes:
        steps: Training batches before the checkpoint, and after it.
    """

    steps: int = 5


_GROUPS: dict[str, dict[str, type[Any]]] = {
    "trainer": {"trainer": TrainerConf},
    "launcher": {"local_launcher": LocalLauncherConf, "torchrun": TorchrunConf},
    "strategy": {"pipeline": PipelineParallelStrategyConf},
    "model": {
        "byte_gpt": ByteGPTConf,
        "causal_lm": CausalLMConf,
        "seq2seq": Seq2SeqLMConf,
        "image_classifier": ImageClassifierConf,
        "two_tower": TwoTowerConf,
    },
    "optimizer": {"adamw": AdamWConf, "sgd": SGDConf, "adafactor": AdafactorConf},
    "data": {
        "byte_text": ByteTextDataModuleConf,
        "span_corruption": SpanCorruptionDataModuleConf,
        "tokens": TokenDataModuleConf,
        "stream": StreamDataModuleConf,
        "images": ImageDataModuleConf,
    },
    "logger": {"wandb": WandbConf, "csv": CSVLoggerConf},
    "callbacks": {
        "checkpoint": CheckpointConf,
        "prediction_writer": PredictionWriterConf,
        "pipeline_monitor": PipelineMonitorConf,
        "pipeline_profiler": PipelineProfilerConf,
        "memory_snapshots": MemorySnapshotsConf,
    },
}


def register() -> None:
    """Put the schema into Hydra's ConfigStore: ``run_schema``, and ``<group>/<name>_schema`` for each group.

    Recipes may write ``${quarter_of:${trainer.max_steps}}``: a quarter of a number, rounded down, and at least 1.
    """
    OmegaConf.register_new_resolver("quarter_of", lambda number: max(1, number // 4), replace=True)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=CommandConf)
    store.store(name="plan_schema", node=PlanConf)
    store.store(name="verify_schema", node=VerifyConf)
    for group, confs in _GROUPS.items():
        for name, conf in confs.items():
            package = {"optimizer": "model.optimizer", "callbacks": f"callbacks.{name}"}.get(group)
            store.store(group=group, name=f"{name}_schema", node=conf, package=package)
