"""The metrics that are logged, and what each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: After ``pp/``; that of a stage is followed by ``/stage_{s}``.
        meaning: For a reader, with the runs that have it if not all do; units stand in the name.
    """

    name: str
    meaning: str


def stage_metric(name: str, stage: int | str) -> str:
    """The name under which a metric of a stage is logged, the metric first: one group holds it for all stages."""
    return f"pp/{name}/stage_{stage}"


STAGE_METRICS = (
    Metric("forward_ms", "F of one microbatch"),
    Metric("backward_input_ms", "I of one microbatch; all of the backward where it is not split (B)"),
    Metric("backward_weight_ms", "W of one microbatch; 0 where the backward is not split"),
    Metric("backward_ms", "the whole backward of one microbatch: I and W, or B"),
    Metric("bubble_fraction", "1 − work / span of the stage's rank; the span runs from its first action to its last"),
    Metric("p2p_wait_ms", "time in a step that the rank waited for other stages; not with one stage"),
    Metric("gather_exposed_ms", "time in a step that F, I or B waited for parameters; only with sharding"),
    Metric("gather_hidden_ms", "time in a step that gathers ran beside other work; only with sharding"),
    Metric("reduce_exposed_ms", "time in a step that the rank waited for gradients; only with replicas"),
    Metric("reduce_hidden_ms", "time in a step that reductions ran beside other work; only with replicas"),
    Metric("sent_bytes", "values and gradients that the stage sends to other ranks in a step; not with one stage"),
    Metric("peak_memory_gib", "CUDA: the most that tensors held since the last reading; CPU: the process's peak"),
    Metric("memory_allocated_gib", "CUDA: what tensors hold now; CPU: what the process holds (resident set)"),
    Metric("memory_reserved_gib", "what torch's allocator has reserved on the device; CUDA only"),
    Metric("activations_gib", "the most that microbatches hold on the rank between F and W, as simulated"),
    Metric("gradient_norm", "2-norm of the stage's gradients, before clipping, over all shards"),
)

PIPELINE_METRICS = (
    Metric("step_ms", "wall time from the end of one training batch to the end of the next"),
    Metric(
        "bubble_fraction", "1 − mean work of the ranks / longest span, as in the zero-bubble papers (arXiv:2401.10241)"
    ),
    Metric("imbalance", "work of the rank with the most over the mean of the ranks, − 1: 0.1 is 10 %"),
    Metric("predicted_over_measured", "the step time that the plan predicts over `pp/step_ms`"),
    Metric("data_wait_ms", "time in a step that training waited for its loader, on the rank that waited longest"),
    Metric("samples_per_s", "samples of all replicas, over the time of their steps"),
    Metric("tokens_per_s", "tokens of all replicas, over that time; only with token ids in the batch"),
    Metric("samples", "samples trained so far, with those before a resume"),
    Metric("tokens", "tokens trained so far; only with token ids in the batch"),
    Metric("learning_rate", "of the first group of the first optimizer, at the end of the step"),
    Metric("gradient_norm", "2-norm of all gradients, before clipping; shared parameters count once"),
    Metric("tflops_per_device", "operations of forward and backward (two forwards), without recomputation"),
    Metric("model_flops_utilization", "`pp/tflops_per_device` over the device's peak; only where that is known"),
)
