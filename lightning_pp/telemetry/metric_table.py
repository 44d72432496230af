"""The metrics that are logged, and what each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: After ``pp/``; that of a stage is followed by ``/stage_{s}``.
        meaning: For a reader, with the runs that have it if not all do; units are in the name.
    """

    name: str
    meaning: str


def stage_metric(name: str, stage: int | str) -> str:
    """The name under which a metric of a stage is logged, the metric first: one group holds it for all stages."""
    return f"pp/{name}/stage_{stage}"


STAGE_METRICS = (
    Metric("forward_ms", "F of one microbatch"),
    Metric("backward_input_ms", "I of one microbatch; the whole backward if it is not split (B)"),
    Metric("backward_weight_ms", "W of one microbatch; 0 if the backward is not split"),
    Metric("backward_ms", "the whole backward of one microbatch: I and W, or B"),
    Metric("bubble_fraction", "1 − work / span of the stage's rank; the span runs from its first action to its last"),
    Metric("p2p_wait_ms", "wait for other stages per step; not with one stage"),
    Metric("gather_exposed_ms", "wait of F, I and B for gathered parameters per step; only with sharding"),
    Metric("gather_hidden_ms", "gathers that overlapped other work, per step; only with sharding"),
    Metric("reduce_exposed_ms", "wait for reductions of gradients per step; only with replicas"),
    Metric("reduce_hidden_ms", "reductions that overlapped other work, per step; only with replicas"),
    Metric("sent_bytes", "values and gradients sent by the stage to other ranks per step; not with one stage"),
    Metric("peak_memory_gib", "CUDA: peak memory of tensors since the last reading; CPU: peak of the process"),
    Metric("memory_allocated_gib", "CUDA: current memory of tensors; CPU: resident set of the process"),
    Metric("memory_reserved_gib", "memory reserved by torch's allocator; CUDA only"),
    Metric("activations_gib", "simulated peak memory of microbatches between F and W on the rank"),
    Metric("gradient_norm", "2-norm of the stage's gradients, before clipping, over all shards"),
)

PIPELINE_METRICS = (
    Metric("step_ms", "wall time from the end of one training batch to the end of the next"),
    Metric(
        "bubble_fraction", "1 − mean work of the ranks / longest span, as in the zero-bubble papers (arXiv:2401.10241)"
    ),
    Metric("imbalance", "work of the busiest rank / mean work of the ranks − 1: 0.1 is 10 %"),
    Metric("predicted_over_measured", "step time predicted by the plan / `pp/step_ms`"),
    Metric("data_wait_ms", "wait for the loader per step, on the rank that waited longest"),
    Metric("samples_per_s", "samples of all replicas per second of step time"),
    Metric("tokens_per_s", "tokens of all replicas per second of step time; only with token ids in the batch"),
    Metric("samples", "samples trained so far, including those before a resume"),
    Metric("tokens", "tokens trained so far; only with token ids in the batch"),
    Metric("learning_rate", "learning rate of the first parameter group, at the end of the step"),
    Metric("gradient_norm", "2-norm of all gradients, before clipping; shared parameters count once"),
    Metric("tflops_per_device", "operations of forward and backward (two forwards), without recomputation"),
    Metric("model_flops_utilization", "`pp/tflops_per_device` / the device's peak; only if that is known"),
)
