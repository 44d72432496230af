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
    """``lightning.pytorch.Trainer``; its strategy, logger and callbacks have groups of their own.

    Attributes:
        accelerator: Which kind of device: ``cpu``, ``gpu``, or ``auto`` for what there is.
        devices: How many devices of a node, a list of their numbers, or ``auto`` for all; with ``cpu`` how many
            processes.
        num_nodes: Machines that train together; each has as many devices.
        precision: In which numbers to compute: ``32-true``, ``64-true``, ``bf16-true``, ``bf16-mixed``, or ``16-mixed``
            on CUDA.
        fast_dev_run: True for one batch of each kind and no logger, to find mistakes; a number for as many.
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
        seconds: None: ten minutes over NCCL, half an hour over gloo, as torch has it.
    """

    _target_: str = "lightning_pp.conf.builders.timeout"
    seconds: float | None = None


@dataclass
class PipelineStrategyConf:
    """``lightning_pp.PipelineParallelStrategy``, where each argument is told at more length.

    Attributes:
        pipeline_parallel_size: Ranks along the pipeline; ``auto`` for all that data parallelism leaves.
        data_parallel_size: Replicas of the pipeline; ``auto`` for all that the pipeline leaves.
        num_microbatches: Slices of a batch, along dimension 0; ``auto`` for 2 to 4 per rank of the pipeline.
        split_batch: A function that cuts a batch: ``{_target_: hydra.utils.get_method, path: my_module.split_graphs}``.
        schedule: Name of a schedule, ``auto`` for one that is searched with measured costs, or the path of a CSV file.
        stages_per_rank: Stages on each rank; null for what is usual for the schedule.
        costs: JSON file of measured costs of the stages, from ``save_costs`` of an earlier run; nothing is measured
            then.
        save_costs: JSON file to write measured costs to.
        num_profiled_batches: Training batches that are measured, after two that warm up.
        memory_limit_gib: GiB that a rank may hold of microbatches between forward and weight gradient.
        device_memory_gib: GiB that a rank may hold altogether, by the estimate of a dry run; cuts and ``auto`` keep to
            it.
        search_seconds: How long the search of ``auto`` may try, seconds; null for as long as its effort takes.
        whole_batch_loss: For a loss that is no mean or sum over samples: the code after the last unit runs once, on all
            microbatches.
        check_first_batches: Whether the first batches are checked for losses that couple samples.
        on_nonfinite: What a loss or gradient that is NaN or infinite does: ``error``, ``skip`` or ``ignore``.
        unequal_data: What ranks with different numbers of batches do: ``error``, or ``shortest`` to stop with the
            first.
        units: Names or shell patterns of modules that stay whole on one stage; null for those that are found.
        split_points: Units that begin stages 1, 2, ...; null for the cut with the shortest step.
        unit_weights: Names or shell patterns of units, each with a factor for its cost in the cut.
        rank_speeds: How fast each rank of the pipeline is, compared with the others.
        split_head: Parts along its classes that a last projection with a cross entropy is cut into; false for none,
            ``auto`` if it costs more than a stage.
        sharding: What data-parallel ranks share of a stage: ``replicate``, ``shard_grad_op`` or ``full_shard``.
        unshard_budget: With ``full_shard`` the most bytes of gathered parameters on a rank.
        cpu_offload: Whether parameters, gradients and optimizer states are on the host between uses.
        data_parallel_replicate_size: How many of the data-parallel ranks hold the same shards (HSDP).
        compile: True, or options of ``torch.compile``: every unit by itself, but no single layers of torch.
        activation_checkpointing: True for repeated blocks, or names and patterns of units: they run again in backward.
        save_distributed_checkpoint: True for a folder of shards, false for one file that a plain Trainer resumes from.
        async_checkpoint: Whether checkpoints are written while training goes on.
        meta_init: Whether ``configure_model`` runs without memory for parameters, and ranks make their own part only.
        initial_weights: What to start from: a safetensors file, a Hugging Face directory or a checkpoint, by path or
            URL.
        process_group_backend: ``nccl`` or ``gloo``; null for what suits the device.
        timeout: How long a collective or a message may take.
        deadlock_seconds: How long all ranks may wait for each other before the run ends.
        preemption_seconds: How long the next batch may take to begin after a signal, before the run ends unsaved.
        flight_recorder_dirpath: Folder for the records of NCCL's flight recorder after a time-out; null for none.
    """

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
    search_seconds: float | None = None
    whole_batch_loss: bool = False
    check_first_batches: bool = True
    on_nonfinite: str = "error"
    unequal_data: str = "error"
    units: list[str] | None = None
    split_points: list[str] | None = None
    unit_weights: Any = None  # a dict of names to numbers: of a typed one that is None nothing can be set
    rank_speeds: list[float] | None = None
    split_head: Any = "auto"  # a number, or false
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
    deadlock_seconds: float = 60.0
    preemption_seconds: float = 25.0
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
class StreamConf:
    """``lightning_pp.recipes.streams.StreamDataModule``.

    Attributes:
        path: What ``datasets.load_dataset`` reads: ``json``, ``parquet`` or ``text`` with ``data_files``, a folder, or
            a dataset of a hub.
        name: Of a dataset that has several configurations.
        data_files: A path or pattern, a list of them, or ``{train: ..., validation: ...}`` with those of each split.
        split: To train on.
        val_split: To validate, test and predict on; null for no validation.
        text_field: What holds the text of a document.
        tokenizer: ``byte``, a ``tokenizer.json``, or a directory with a tokenizer.
        end: Token that ends each document; null for the tokenizer's own, empty for none.
        batch_size: Rows in a batch of a data-parallel rank.
        seq_len: Tokens of a row.
        shuffle_buffer: Documents from which the next one is drawn, anew in each epoch; 0 for the order of the files.
        seed: Of these draws.
        num_val_batches: Most batches of a validation.
        num_workers: Processes that load for training; each reads files of its own.
    """

    _target_: str = "lightning_pp.recipes.streams.StreamDataModule"
    path: str = MISSING
    name: str | None = None
    data_files: Any = None
    split: str = "train"
    val_split: str | None = None
    text_field: str = "text"
    tokenizer: str = "byte"
    end: str | None = None
    batch_size: int = 16
    seq_len: int = 1024
    shuffle_buffer: int = 0
    seed: int = 0
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


@dataclass
class PipelineMonitorConf:
    """``lightning_pp.PipelineMonitor``.

    Attributes:
        every_n_steps: Optimizer steps from one entry to the next; null for ``trainer.log_every_n_steps``.
        log_timeline: Whether timelines are written, at least at the end of a fit.
        timeline_every_n_steps: Optimizer steps from one timeline to the next; null for the end only.
        timeline_dirpath: Folder of the timelines; null for one in the logger's folder.
        peak_tflops: What one device can do at most, in TFLOP/s; null for what Lightning knows of the GPU.
    """

    _target_: str = "lightning_pp.PipelineMonitor"
    every_n_steps: int | None = None
    log_timeline: bool = True
    timeline_every_n_steps: int | None = None
    timeline_dirpath: str | None = None
    peak_tflops: float | None = None


@dataclass
class PipelineProfilerConf:
    """``lightning_pp.PipelineProfiler``.

    Attributes:
        wait: Batches before a window.
        warmup: Batches for which the profiler runs and keeps nothing.
        active: Batches in a window.
        repeat: Windows; 0 for as many as the fit has.
        ranks: ``all``, or the numbers of the processes to profile.
        dirpath: Folder of the traces; null for one in the logger's folder.
        nvtx: NVTX ranges for Nsight Systems in place of traces.
        record_shapes: Whether shapes are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether lines of code are recorded.
    """

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
    """``lightning_pp.MemorySnapshots``.

    Attributes:
        every_n_steps: Optimizer steps from one snapshot to the next; null for only when memory runs out.
        max_entries: The most allocations and releases that are kept.
        ranks: ``all``, or the numbers of the processes to record.
        dirpath: Folder of the snapshots; null for one in the logger's folder.
    """

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


def register() -> None:
    """Put the schema into Hydra's ConfigStore: ``run_schema``, and ``<group>/<name>_schema`` for each group.

    Recipes may write ``${quarter_of:${trainer.max_steps}}``: a quarter of a number, rounded down, and at least 1.
    """
    OmegaConf.register_new_resolver("quarter_of", lambda number: max(1, number // 4), replace=True)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=CommandConf)
    store.store(name="plan_schema", node=PlanConf)
    store.store(group="trainer", name="trainer_schema", node=TrainerConf)
    store.store(group="launcher", name="local_launcher_schema", node=LocalLauncherConf)
    store.store(group="launcher", name="torchrun_schema", node=TorchrunConf)
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
    store.store(group="data", name="stream_schema", node=StreamConf)
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
