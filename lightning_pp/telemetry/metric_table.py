"""The metrics that are logged, and what each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: After ``pp_stage_{s}/`` or ``pp/``.
        meaning: For a reader; units stand in the name.
        is_optional: Whether there are runs without it; ``meaning`` says which.
    """

    name: str
    meaning: str
    is_optional: bool = False


STAGE_METRICS = (
    Metric("forward_ms", "F of one microbatch"),
    Metric("backward_input_ms", "I of one microbatch; where the backward is not split (B), all of it"),
    Metric("backward_weight_ms", "W of one microbatch; 0 where the backward is not split"),
    Metric("backward_ms", "the whole backward of one microbatch: I and W, or B"),
    Metric(
        "bubble_fraction",
        "1 − work / span of the stage's rank; span is from the start of its first F, I, W or B to the end of its last",
    ),
    Metric("p2p_wait_ms", "time in a step that the rank stood waiting for what this stage needed from other ranks"),
    Metric(
        "gather_exposed_ms",
        "time in a step that the rank stood waiting for gathers of this stage's parameters, within F, I or B",
    ),
    Metric("gather_hidden_ms", "time in a step that these gathers ran before the rank waited for them"),
    Metric(
        "reduce_exposed_ms",
        "time in a step that the rank stood waiting for reductions of this stage's gradients over the replicas; with "
        "them, on the rank's first stage, those of parameters that are used outside their unit or on several stages",
    ),
    Metric(
        "reduce_hidden_ms",
        "time in a step that these reductions ran before the rank waited for them; where "
        "gloo scatters, which does not say when it is done, all the time until then",
    ),
    Metric("sent_bytes", "bytes that the stage sends to other ranks in a step, values and gradients"),
    Metric(
        "peak_memory_gib",
        "CUDA: the most that tensors held since the last reading; CPU: the largest resident set of the process so far",
    ),
    Metric("memory_allocated_gib", "CUDA: what tensors hold now; CPU: the resident set of the process"),
    Metric("memory_reserved_gib", "CUDA: what torch's allocator has taken from the device; CPU: as allocated"),
    Metric(
        "activations_gib",
        "the most that the rank holds of microbatches between their F and their W, as the step is simulated with the "
        "bytes of a dry run, or of measurements where there were any",
    ),
    Metric(
        "gradient_norm",
        "2-norm of the stage's gradients at this update, before clipping, over all shards; not where no hook "
        "`on_before_optimizer_step` is called",
        True,
    ),
)

PIPELINE_METRICS = (
    Metric("step_ms", "wall time from the end of one training batch to the end of the next"),
    Metric(
        "bubble_fraction",
        "1 − work / longest span, work being the mean over the ranks: the definition of the zero-bubble papers "
        "(arXiv:2401.10241)",
    ),
    Metric("imbalance", "by how much the rank with the most work has more than the mean of the ranks: 0.1 is 10 %"),
    Metric(
        "predicted_over_measured",
        "the step time that the schedule was chosen for over the measured `pp/step_ms`; a guess until costs are "
        "measured or given, as `pp/costs_from` tells",
    ),
    Metric("data_wait_ms", "time in a step that the training waited for its loader, on the rank where it was longest"),
    Metric("samples_per_s", "samples of all replicas over the time of their steps"),
    Metric("tokens_per_s", "tokens of all replicas over that time; not where the batch holds no token ids", True),
    Metric("samples", "samples that the training has seen, those before a resume included"),
    Metric("tokens", "tokens that it has seen; not where the batch holds no token ids", True),
    Metric("learning_rate", "of the first group of the first optimizer, at the end of the step"),
    Metric(
        "gradient_norm",
        "2-norm of all gradients at this update, before clipping, shared parameters counted once; there as of stages",
        True,
    ),
    Metric(
        "tflops_per_device",
        "operations of the model's forward and backward, which is taken for two forwards, by device and second; what "
        "is computed again (activation checkpointing) does not count",
    ),
    Metric(
        "model_flops_utilization",
        "`pp/tflops_per_device` over what a device can do at most: `PipelineMonitor(peak_tflops=)`, or what Lightning "
        "knows of the GPU and precision; not where neither is known",
        True,
    ),
)
