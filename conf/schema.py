"""The typed schema of every config group: an override that does not exist, or has the wrong type, fails at composition.

``_target_`` names what each group builds. Fields carry the defaults of what they build; the YAML files beside this one
hold only what differs. ``Any`` stands where OmegaConf has no type for what Lightning accepts (number, list, word).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


class Mode(Enum):
    """Which Trainer method a run calls."""

    fit = "fit"
    validate = "validate"
    test = "test"
    predict = "predict"


@dataclass
class TrainerConf:
    """``lightning.pytorch.Trainer``; its strategy, logger and callbacks have groups of their own."""

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
class TimeoutConf:
    """How long a collective or a message may take before the job is given up.

    Attributes:
        seconds: None: ten minutes over NCCL, half an hour over gloo, as torch has it.
    """

    _target_: str = "lightning_pp.conf.builders.timeout"
    seconds: float | None = None


@dataclass
class PipelineStrategyConf:
    """``lightning_pp.PipelineParallelStrategy``: the arguments are documented there."""

    _target_: str = "lightning_pp.PipelineParallelStrategy"
    pipeline_parallel_size: int | str = "auto"
    data_parallel_size: int | str = "auto"
    num_microbatches: int | str = "auto"
    split_batch: Any = None  # a function: {_target_: hydra.utils.get_method, path: my_package.my_module.split_graphs}
    schedule: str = "zb_h1"
    stages_per_rank: int | None = None
    costs: Any = None
    save_costs: str | None = None
    num_profiled_batches: int = 8
    memory_limit_gib: float | None = None
    device_memory_gib: float | None = None
    exact_search: bool = False
    whole_batch_loss: bool = False
    check_first_batches: bool = True
    on_nonfinite: str = "error"
    unequal_data: str = "error"
    units: list[str] | None = None
    split_points: list[str] | None = None
    unit_weights: Any = None  # a dict of names to numbers: of a typed one that is None nothing can be set
    rank_speeds: list[float] | None = None
    sharding: str = "shard_grad_op"
    unshard_budget: int | None = None
    cpu_offload: bool = False
    data_parallel_replicate_size: int = 1
    compile: Any = False
    activation_checkpointing: Any = False
    save_distributed_checkpoint: bool = True
    async_checkpoint: bool = False
    meta_init: bool = False
    initial_weights: str | None = None
    process_group_backend: str | None = None
    timeout: TimeoutConf = field(default_factory=TimeoutConf)
    flight_recorder_dirpath: str | None = None


@dataclass
class ByteGPTConf:
    """``lightning_pp.recipes.byte_gpt.ByteGPT``.

    Attributes:
        num_layers: Transformer blocks.
        dim: Width of the model.
        num_heads: Attention heads; divides ``dim``.
        max_seq_len: Longest sequence that there are positions for.
        dropout: Probability of dropping an activation.
        learning_rate: At its peak, after the warm-up.
        num_warmup_steps: Optimizer steps until then.
        weight_decay: Of matrices.
        optimizer: What the group ``optimizer`` gives; null is AdamW.
    """

    _target_: str = "lightning_pp.recipes.byte_gpt.ByteGPT"
    num_layers: int = 8
    dim: int = 128
    num_heads: int = 4
    max_seq_len: int = 128
    dropout: float = 0.0
    learning_rate: float = 3e-3
    num_warmup_steps: int = 20
    weight_decay: float = 0.1
    optimizer: Any = None


@dataclass
class CausalLMConf:
    """``lightning_pp.recipes.causal_lm.CausalLM``.

    Attributes:
        model_type: An architecture of transformers, with fresh weights; or else ``directory``.
        config: Arguments of its configuration class; with ``directory``, in place of values of its ``config.json``.
        directory: A model directory on this machine.
        weights: Whether each process reads its weights; false with ``strategy.initial_weights``.
        lora: Arguments of ``peft.LoraConfig``; null trains all parameters.
        learning_rate: At its peak, after the warm-up.
        num_warmup_steps: Optimizer steps until then.
        weight_decay: Of matrices.
        activation_checkpointing: Compute the activations of blocks again in backward.
        optimizer: What the group ``optimizer`` gives; null is AdamW.
    """

    _target_: str = "lightning_pp.recipes.causal_lm.CausalLM"
    model_type: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    directory: str | None = None
    weights: bool = True
    lora: Any = None  # a dict: of a typed one that is None nothing can be set
    learning_rate: float = 6e-4
    num_warmup_steps: int = 100
    weight_decay: float = 0.1
    activation_checkpointing: bool = False
    optimizer: Any = None


@dataclass
class Seq2SeqLMConf(CausalLMConf):
    """``lightning_pp.recipes.seq2seq.Seq2SeqLM``; the fields are those of :class:`CausalLMConf`."""

    _target_: str = "lightning_pp.recipes.seq2seq.Seq2SeqLM"


@dataclass
class ImageClassifierConf(CausalLMConf):
    """``lightning_pp.recipes.images.ImageClassifier``; the fields are those of :class:`CausalLMConf`."""

    _target_: str = "lightning_pp.recipes.images.ImageClassifier"


@dataclass
class TwoTowerConf:
    """``lightning_pp.recipes.two_tower.TwoTower``.

    Attributes:
        num_layers: Transformer blocks of each tower.
        dim: Width of the towers.
        num_heads: Attention heads; divides ``dim``.
        max_seq_len: Longest half of a text; ``data.seq_len`` is both halves.
        temperature: Similarities are divided by it.
        learning_rate: At its peak, after the warm-up.
        num_warmup_steps: Optimizer steps until then.
        weight_decay: Of matrices.
        optimizer: What the group ``optimizer`` gives; null is AdamW.
    """

    _target_: str = "lightning_pp.recipes.two_tower.TwoTower"
    num_layers: int = 4
    dim: int = 128
    num_heads: int = 4
    max_seq_len: int = 64
    temperature: float = 0.05
    learning_rate: float = 1e-3
    num_warmup_steps: int = 20
    weight_decay: float = 0.1
    optimizer: Any = None


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


@dataclass
class ByteTextConf:
    """``lightning_pp.recipes.byte_text.ByteTextDataModule``.

    Attributes:
        files: Paths and patterns of text files; none: the sources of the running Python's standard library.
        batch_size: Sequences in a batch of a data-parallel rank.
        seq_len: Bytes in a sequence.
        num_train_crops: Sequences in an epoch.
        num_val_crops: Sequences of a validation.
        val_fraction: The last part of the text, which is not trained on.
        max_bytes: Text beyond that is not read.
        seed: Chooses the sequences of an epoch.
        num_workers: Processes that load.
    """

    _target_: str = "lightning_pp.recipes.byte_text.ByteTextDataModule"
    files: list[str] = field(default_factory=list)
    batch_size: int = 16
    seq_len: int = 128
    num_train_crops: int = 65536
    num_val_crops: int = 64
    val_fraction: float = 0.05
    max_bytes: int = 4194304
    seed: int = 0
    num_workers: int = 0


@dataclass
class SpanCorruptionConf(ByteTextConf):
    """``lightning_pp.recipes.seq2seq.SpanCorruptionDataModule``: the fields of :class:`ByteTextConf`, and its own.

    Attributes:
        num_spans: Spans that are left out of each sequence.
        span_length: Bytes of a span.
    """

    _target_: str = "lightning_pp.recipes.seq2seq.SpanCorruptionDataModule"
    num_spans: int = 8
    span_length: int = 3


@dataclass
class TokensConf:
    """``lightning_pp.recipes.tokens.TokenDataModule``.

    Attributes:
        directory: The folder that ``lightning-pp-data`` made.
        batch_size: Rows in a batch of a data-parallel rank.
        seq_len: Tokens of a row.
        documents: ``joined`` (windows over all documents), ``masked`` (windows in which no document sees another) or
            ``separate`` (a document a row, of its own length).
        pad_to_multiple: For ``separate``: of which lengths are a multiple.
        val_fraction: Share of the documents, from the end, that is not trained on.
        num_val_batches: Most batches of a validation.
        num_workers: Processes that load.
    """

    _target_: str = "lightning_pp.recipes.tokens.TokenDataModule"
    directory: str = MISSING
    batch_size: int = 16
    seq_len: int = 1024
    documents: str = "joined"
    pad_to_multiple: int = 64
    val_fraction: float = 0.01
    num_val_batches: int = 16
    num_workers: int = 0


@dataclass
class ImagesConf:
    """``lightning_pp.recipes.images.ImageDataModule``.

    Attributes:
        folder: Has ``train`` and ``val``, each with ``images.npy`` and ``labels.npy``; null draws images.
        batch_size: Images in a batch of a data-parallel rank.
        image_size: Height and width of drawn images.
        num_classes: Of drawn images.
        num_train_images: Drawn images of an epoch.
        num_val_images: Drawn images of a validation.
        num_workers: Processes that load.
    """

    _target_: str = "lightning_pp.recipes.images.ImageDataModule"
    folder: str | None = None
    batch_size: int = 64
    image_size: int = 224
    num_classes: int = 10
    num_train_images: int = 10000
    num_val_images: int = 256
    num_workers: int = 0


@dataclass
class WandbConf:
    """``lightning_pp.PipelineWandbLogger``; what it does not name goes to ``wandb.init``.

    Attributes:
        group: The runs of a sweep have the sweep's folder for one, unless this says another.
        id: The same as ``version``. ``resume=FOLDER`` of the command fills it in.
        resume: What wandb does where a run of this id is there already.
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
    """``lightning.pytorch.loggers.CSVLogger``."""

    _target_: str = "lightning.pytorch.loggers.CSVLogger"
    save_dir: str = MISSING
    name: str | None = "csv"
    version: Any = None
    prefix: str = ""
    flush_logs_every_n_steps: int = 100


@dataclass
class CheckpointConf:
    """``lightning.pytorch.callbacks.ModelCheckpoint``."""

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


@dataclass
class PipelineMonitorConf:
    """``lightning_pp.PipelineMonitor``."""

    _target_: str = "lightning_pp.PipelineMonitor"
    every_n_steps: int | None = None
    log_timeline: bool = True
    timeline_every_n_steps: int | None = None
    timeline_dirpath: str | None = None
    peak_tflops: float | None = None


@dataclass
class PipelineProfilerConf:
    """``lightning_pp.PipelineProfiler``."""

    _target_: str = "lightning_pp.PipelineProfiler"
    wait: int = 10
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    ranks: Any = "all"
    dirpath: str | None = None
    nvtx: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False


@dataclass
class MemorySnapshotsConf:
    """``lightning_pp.MemorySnapshots``."""

    _target_: str = "lightning_pp.MemorySnapshots"
    every_n_steps: int | None = None
    max_entries: int = 100000
    ranks: Any = "all"
    dirpath: str | None = None


@dataclass
class PredictionWriterConf:
    """``lightning_pp.callbacks.PredictionWriter``.

    Attributes:
        folder: Of the files with predictions, one for each batch.
    """

    _target_: str = "lightning_pp.callbacks.PredictionWriter"
    folder: str = MISSING


@dataclass
class RunConf:
    """One run: what to build, from which groups, and what to do with it."""

    mode: Mode = Mode.fit
    ckpt_path: str | None = None
    seed: int = 0
    trainer: Any = MISSING
    strategy: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    logger: Any = MISSING
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass
class CommandConf(RunConf):
    """What ``lightning-pp`` is asked.

    ``resume``: the folder of a run to go on with, from its newest checkpoint; or ``auto``: that of
    ``hydra.run.dir``, if it has saved something.
    """

    resume: str | None = None


@dataclass
class PlanConf(RunConf):
    """What ``lightning-pp-plan`` is asked, besides what a run is.

    ``check``: only whether the module can be cut. ``costs``: a JSON file of measured costs; without it they are
    estimated from FLOPs, for ``device`` (a name such as ``h100 sxm``) or ``peak_tflops``, of which ``efficiency`` is
    reached, and ``link_gb_per_s`` between two ranks. ``device_memory_gib``: the most that a rank may hold, everything
    included. ``schedules``: which to compare, by default all. ``show``: the schedule to draw and export: ``best``,
    ``configured`` or a name. ``out``: a folder for ``plan.json``, the pictures and the CSV file.
    """

    check: bool = False
    costs: str | None = None
    device: str | None = None
    peak_tflops: float | None = None
    efficiency: float = 0.4
    link_gb_per_s: float = 25.0
    device_memory_gib: float | None = None
    schedules: list[str] | None = None
    show: str = "best"
    out: str | None = None


def register() -> None:
    """Put the schema into Hydra's ConfigStore: ``run_schema``, and ``<group>/<name>_schema`` for each group.

    Recipes may write ``${quarter_of:${trainer.max_steps}}``: a quarter of a number, rounded down, and at least 1.
    """
    OmegaConf.register_new_resolver("quarter_of", lambda number: max(1, number // 4), replace=True)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=CommandConf)
    store.store(name="plan_schema", node=PlanConf)
    store.store(group="trainer", name="trainer_schema", node=TrainerConf)
    store.store(group="strategy", name="pipeline_schema", node=PipelineStrategyConf)
    store.store(group="model", name="byte_gpt_schema", node=ByteGPTConf)
    store.store(group="model", name="causal_lm_schema", node=CausalLMConf)
    store.store(group="model", name="seq2seq_schema", node=Seq2SeqLMConf)
    store.store(group="model", name="image_classifier_schema", node=ImageClassifierConf)
    store.store(group="model", name="two_tower_schema", node=TwoTowerConf)
    for name, node in (("adamw", AdamWConf), ("sgd", SGDConf), ("adafactor", AdafactorConf)):
        store.store(group="optimizer", name=f"{name}_schema", node=node, package="model.optimizer")
    store.store(group="data", name="byte_text_schema", node=ByteTextConf)
    store.store(group="data", name="span_corruption_schema", node=SpanCorruptionConf)
    store.store(group="data", name="tokens_schema", node=TokensConf)
    store.store(group="data", name="images_schema", node=ImagesConf)
    store.store(group="logger", name="wandb_schema", node=WandbConf)
    store.store(group="logger", name="csv_schema", node=CSVLoggerConf)
    store.store(group="callbacks", name="checkpoint_schema", node=CheckpointConf, package="callbacks.checkpoint")
    store.store(
        group="callbacks",
        name="prediction_writer_schema",
        node=PredictionWriterConf,
        package="callbacks.prediction_writer",
    )
    store.store(
        group="callbacks",
        name="pipeline_monitor_schema",
        node=PipelineMonitorConf,
        package="callbacks.pipeline_monitor",
    )
    store.store(
        group="callbacks",
        name="pipeline_profiler_schema",
        node=PipelineProfilerConf,
        package="callbacks.pipeline_profiler",
    )
    store.store(
        group="callbacks",
        name="memory_snapshots_schema",
        node=MemorySnapshotsConf,
        package="callbacks.memory_snapshots",
    )
