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
        accelerator: Kind of device: ``cpu``, ``gpu``, or ``auto`` for what is available.
        devices: Number of devices per node, a list of their indices, or ``auto`` for all; with ``cpu``, number of
            processes.
        num_nodes: Number of machines; each has as many devices.
        precision: ``32-true``, ``64-true``, ``bf16-true``, ``bf16-mixed``, or ``16-mixed`` on CUDA.
        fast_dev_run: true: one batch of each kind without a logger, to find mistakes; or a number of batches.
        max_epochs: Limit of epochs; -1 for none. null: no limit with ``max_steps``, 1000 epochs without.
        min_epochs: Fewest epochs; nothing stops the training earlier.
        max_steps: Limit of optimizer steps, counted from the start of the training; -1 for none.
        min_steps: Fewest optimizer steps.
        max_time: Limit of wall-clock time, as ``DD:HH:MM:SS``.
        limit_train_batches: Training batches per epoch: a number, or a share such as 0.1; null for all.
        limit_val_batches: The same for validation.
        limit_test_batches: The same for test.
        limit_predict_batches: The same for prediction.
        overfit_batches: Train and validate only on these batches: a number, or a share; 0.0 for all data.
        val_check_interval: When to validate: after this many batches, this share of an epoch, or a time
            ``DD:HH:MM:SS``; null for the end of the epoch.
        check_val_every_n_epoch: Epochs from one validation to the next. null: ``val_check_interval`` counts batches
            over epochs.
        num_sanity_val_steps: Validation batches before training; -1 for all; null for 2.
        log_every_n_steps: Optimizer steps from one entry of the log to the next; null for 50.
        enable_checkpointing: Whether to save after each epoch without a checkpoint callback; null for true.
        enable_progress_bar: Whether to show a progress bar; null for true.
        enable_model_summary: Whether to print a table of the model's parts; null for true.
        accumulate_grad_batches: Batches whose gradients are summed before an optimizer step.
        gradient_clip_val: Clip gradients to this norm (over all stages and shards) or value; null for no clipping.
        gradient_clip_algorithm: Clip by ``norm`` or by ``value``; null for ``norm``.
        deterministic: Whether operations must be deterministic; ``warn`` only warns of others.
        benchmark: Whether cuDNN searches for its fastest algorithm; null leaves the setting as it is.
        inference_mode: Whether evaluations use ``torch.inference_mode``; several stages always use ``no_grad``.
        use_distributed_sampler: Whether Lightning shares out the data over the data-parallel ranks; false if the loader
            does.
        profiler: Lightning profiler by name, ``simple`` or ``advanced``; for stages use the callback
            ``pipeline_profiler``.
        detect_anomaly: Whether autograd names the operation that made a NaN; slow.
        barebones: Turn off everything beside training (logger, checkpoints, progress bar), to measure speed.
        plugins: Lightning plugins: a ``_target_`` or a list of them.
        sync_batchnorm: Refused by pipelines, since only some ranks have the layer.
        reload_dataloaders_every_n_epochs: Epochs between new loaders; 0 for never.
        default_root_dir: Folder for files of loggers and callbacks without a folder of their own; null for the current
            one.
        enable_autolog_hparams: Whether loggers get the saved hyper-parameters of the module and the data.
        model_registry: Name for uploading the model to Lightning's model hub; null for no upload.
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
    """The command starts the processes for ``trainer.devices``, unless a launcher has started the command.

    Attributes:
        name: Who starts the processes: ``local``, or ``torchrun``.
    """

    name: str = "local"


@dataclass
class TorchrunConf:
    """The command is replaced by ``torchrun``, unless a launcher has started the command.

    Attributes:
        name: Who starts the processes: ``torchrun``, or ``local``.
        max_restarts: How often all processes restart after a failure; the run continues from its newest checkpoint.
        rdzv_endpoint: With several nodes, ``HOST:PORT`` of one of them, the same on all.
        rdzv_id: With several nodes, name of the job, the same on all.
        options: Further options of torchrun, such as ``[--log-dir,logs]``.
    """

    name: str = "torchrun"
    max_restarts: int = 0
    rdzv_endpoint: str | None = None
    rdzv_id: str = "lightning_pp"
    options: list[str] = field(default_factory=list)


@dataclass
class TimeoutConf:
    """How long a collective or a message may take before the job ends with an error.

    Attributes:
        seconds: Seconds; null: as in torch, ten minutes over NCCL, half an hour over gloo.
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
        betas: Decay of the first and second moments.
        eps: Added to the root of the second moments.
        fused: Use one kernel for all parameters; null is torch's choice.
        foreach: Use a few kernels over all parameters; null is torch's choice.
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
        nesterov: Whether to use Nesterov momentum.
    """

    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    momentum: float = 0.9
    nesterov: bool = False


@dataclass
class AdafactorConf:
    """``torch.optim.Adafactor``, which the model calls with its parameters and learning rate.

    Attributes:
        beta2_decay: Exponent of the step in the decay of the second moments.
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
    """``lightning_pp.PipelineWandbLogger``; other values are passed to ``wandb.init``.

    Attributes:
        name: Name of the run in W&B; null: chosen by W&B.
        save_dir: Folder for wandb's own folder.
        version: Id of the run; a run with a known id is continued.
        id: The same as ``version``. ``resume=FOLDER`` of the command fills it in.
        resume: ``resume`` of ``wandb.init``: what happens if a run of this id exists.
        offline: Whether to keep the run on this machine until ``wandb sync``.
        project: W&B project of the run.
        entity: W&B user or team that owns the project; null for the user's default.
        group: Group of the run; in a sweep, null is the sweep's folder.
        job_type: Kind of run, for grouping in W&B.
        tags: Tags for filtering runs in W&B.
        notes: Text about the run.
        prefix: Prefix of every metric's name.
        log_model: Checkpoints as artifacts: true at the end of a fit, ``all`` as soon as each is written.
        log_model_as: ``files`` uploads a copy, ``reference`` only the location.
        every_node: Whether to record the system metrics of all nodes; needs ``offline: false``.
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
        version: Folder in ``name``; null for the next ``version_N``.
        prefix: Prefix of every metric's name.
        flush_logs_every_n_steps: Steps between writes of the file.
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
        filename: File name, with metrics such as ``{step}`` or ``{val_loss:.2f}``; null for epoch and step.
        monitor: Metric that ranks the checkpoints; null keeps the latest.
        mode: Whether the ``min`` or the ``max`` of that metric is best.
        save_last: Whether to save the newest also as ``last.ckpt``; ``link`` makes a link to it.
        save_top_k: How many of the best to keep; -1 for all, 0 for none.
        save_weights_only: Whether to leave out optimizer and progress; such a checkpoint cannot be resumed from.
        auto_insert_metric_name: Whether ``filename`` shows the names of metrics before their values.
        every_n_train_steps: Optimizer steps between saves.
        every_n_epochs: Epochs between saves.
        save_on_train_epoch_end: Whether to save after a training epoch (true) or after validation (false); null: as the
            trainer needs.
        verbose: Whether to print each save.
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
        mode: Trainer method to call.
        ckpt_path: Checkpoint from which a fit continues, or whose weights other modes load. ``initial``: the model's
            own weights.
        seed: Seed of weights and data.
        trainer: Built from the group ``trainer``.
        strategy: Built from the groups ``strategy`` and ``schedule``.
        model: Built from the groups ``model`` and ``optimizer``.
        data: Built from the group ``data``.
        logger: Built from the group ``logger``.
        callbacks: Built from the group ``callbacks``, by name.
        launcher: From the group ``launcher``; only for ``lightning-pp``.
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
    """Options of ``lightning-pp`` besides those of a run.

    Attributes:
        resume: Folder of a run to continue from its newest checkpoint. ``auto``: the folder ``hydra.run.dir``, if it
            has a checkpoint.
    """

    resume: str | None = None


@dataclass
class PlanConf(RunConf):
    """Options of ``lightning-pp-plan`` besides those of a run.

    Attributes:
        check: Only check whether the module can be cut.
        search: Compare plans of all sizes, microbatches, schedules, sharding and activation checkpointing for the
            devices.
        samples_per_step: With ``search``, samples of all replicas in a step; null: as configured.
        batch_size_key: With ``search``, key of the batch size of one replica in the configuration.
        costs: JSON file of measured costs; null: costs are estimated from FLOPs and bytes.
        measure: Whether to measure costs by running each distinct unit alone on this machine's device.
        measure_seconds: Time limit of ``measure``; each distinct unit runs at least once.
        device: Name of the device to estimate for, such as ``h100 sxm``.
        peak_tflops: Peak TFLOP/s of a device, instead of the known figure for ``device``.
        efficiency: Reached share of the peak.
        links: JSON file of ``lightning-pp-doctor``; its figures replace the following ones. null: none.
        link_gb_per_s: GB/s between two nodes.
        link_latency_us: Latency of a message between two nodes, in microseconds.
        node_link_gb_per_s: GB/s between two ranks of a node; null: as known for ``device``, or else ``link_gb_per_s``.
        node_link_latency_us: Latency of a message between two ranks of a node, in microseconds.
        devices_per_node: Devices per node; null: by ``trainer.num_nodes``, and at most 8 if that is 1.
        memory_gb_per_s: Reached bandwidth of device memory in GB/s; null: 0.8 of the known figure for ``device``.
        device_memory_gib: Memory limit of a rank in GiB, all included; null: as in the strategy.
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
    """Options of ``lightning-pp-verify`` besides those of a run.

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
