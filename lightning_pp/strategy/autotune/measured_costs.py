"""Costs of stages from what the ranks of a pipeline and its replicas measured in training batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from uuid import uuid4

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.planning.stage_costs import BYTES_PER_GIB, crossing_bytes, held_gib, with_held
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.runtime.transport.link_speed import (
    Link,
    measure_gather_and_reduce,
    measure_host_copies,
    measure_links,
)
from lightning_pp.schedule import ActionKind, StageCosts
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.strategy.surroundings import Surroundings

_HELD = "held"

Samples = dict[tuple[int, str], list[float]]
"""Stage and letter of F, I, W (milliseconds) or ``held`` (GiB after I) to what was measured."""


def signature_text(microbatch: Microbatch) -> str:
    """The signature of the data, as text that is the same on all ranks."""
    return str(signature_of(microbatch.data)).replace("torch.Size([", "(").replace("])", ")")


@dataclass
class Profile:
    """Times of some batches on the stages of one rank, by the signature of their microbatches.

    Attributes:
        samples: Signature, as text that is the same on all ranks, to measurements.
        num_samples: Signature to its microbatches' number of samples.
        plans: Signature to the plan of its microbatches.
        numbers: How often a batch had how many microbatches.
    """

    samples: dict[str, Samples] = field(default_factory=dict)
    num_samples: dict[str, int] = field(default_factory=dict)
    plans: dict[str, StepPlan] = field(default_factory=dict)
    numbers: Counter[int] = field(default_factory=Counter)

    def add(
        self,
        timer: StepTimer,
        queued_bytes: Mapping[tuple[int, int], int],
        texts: Sequence[str],
        num_samples: Sequence[int],
        plans: Sequence[StepPlan],
    ) -> None:
        """Adds one batch; on CUDA its timer is read, so the batch should be over."""
        self.numbers[len(texts)] += 1
        self.num_samples.update(zip(texts, num_samples, strict=True))
        self.plans.update(zip(texts, plans, strict=True))
        for times in timer.times():
            stage, index = times.action.stage, times.action.microbatch
            if index is not None and times.action.kind in (ActionKind.F, ActionKind.I, ActionKind.W):
                samples = self.samples.setdefault(texts[index], {})
                samples.setdefault((stage, str(times.action.kind)), []).append(times.work_ms)
        for (stage, index), num_bytes in queued_bytes.items():
            samples = self.samples.setdefault(texts[index], {})
            samples.setdefault((stage, _HELD), []).append(num_bytes / BYTES_PER_GIB)


@dataclass(frozen=True)
class Measured:
    """The costs measured in the first batches; the same on every rank.

    Attributes:
        costs: Of the stages; ``held_*`` in GiB.
        num_microbatches: Of the most frequent batch.
        num_samples: In the microbatches that count, those of the most frequent signature.
        signature: That signature.
    """

    costs: StageCosts
    num_microbatches: int
    num_samples: int
    signature: str


@dataclass(eq=False)
class CostExchange:
    """Makes one set of costs from the profiles of all ranks; every rank takes part, and all get the same.

    Attributes:
        given: Where the pipeline runs, and its options.
        split: The split model.
        groups: Who talks to whom.
    """

    given: Surroundings
    split: SplitModel
    groups: ControlGroups

    def exchange(self, profile: Profile) -> Measured:
        """The medians of all ranks and replicas, and the times of messages."""
        num_stages = self.split.placement.num_stages
        own = {
            text: {key: (len(values), median(values)) for key, values in samples.items()}
            for text, samples in profile.samples.items()
        }
        in_pipeline: dict[str, dict[tuple[int, str], tuple[int, float]]] = {}
        for part in self.groups.gather_in_pipeline(own):
            for text, medians in part.items():
                in_pipeline.setdefault(text, {}).update(medians)
        everywhere = self.groups.gather((in_pipeline, profile.numbers, profile.num_samples), "measured times")
        counts: Counter[str] = Counter()
        numbers: Counter[int] = Counter()
        num_samples: dict[str, int] = {}
        for medians_of, numbers_of, num_samples_of in everywhere:
            counts.update({text: medians[0, "F"][0] for text, medians in medians_of.items() if (0, "F") in medians})
            numbers += numbers_of
            num_samples.update(num_samples_of)
        signature = max(counts, key=lambda text: (counts[text], text))

        def over_replicas(stage: int, what: str) -> float:
            found = [
                medians_of[signature][stage, what][1]
                for medians_of, _, _ in everywhere
                if (stage, what) in medians_of.get(signature, {})
            ]
            return median(found) if found else 0.0

        forward, backward_input, backward_weight = (
            [over_replicas(stage, letter) for stage in range(num_stages)] for letter in ("F", "I", "W")
        )
        after_input = [over_replicas(stage, _HELD) for stage in range(num_stages)]
        # a replica that has never seen this signature takes its own for the sizes of messages
        text = signature if signature in profile.plans else max(profile.plans)
        plan = profile.plans[text]
        p2p, p2p_back, gathers, reductions = self._measure_messages(plan)
        costs = StageCosts(
            forward, backward_input, backward_weight, p2p, gather=gathers, reduce=reductions, p2p_back=p2p_back
        )
        split = self.split  # tensor ranks keep of any batch about what they keep of the first
        record = plan.record if split.on_parts is None else split.on_parts.record
        whole_batch_loss = self.given.options.schedule.whole_batch_loss
        by_dry_run = held_gib(record, split.partition, split.placement, whole_batch_loss=whole_batch_loss)[0]
        held = self.groups.gather(by_dry_run if text == signature else None, "what it holds")
        after_forward = next(found for found in held if found is not None)
        return Measured(
            with_held(costs, after_forward, after_input, whole_batch_loss=whole_batch_loss),
            max(numbers, key=lambda number: (numbers[number], number)),
            num_samples[signature],
            signature,
        )

    def _measure_messages(self, plan: StepPlan) -> tuple[list[float], list[float], list[float], list[float]]:
        """Milliseconds per stage of messages to the next and to the one before, gathers, reductions; equal on all."""
        placement = self.split.placement
        rank_of_stage, num_stages = placement.rank_of_stage, placement.num_stages
        sent = crossing_bytes(plan, self.groups.num_tensor_ranks)
        links = {
            stage: Link(rank_of_stage[stage], rank_of_stage[stage + 1], sent[stage])
            for stage in range(num_stages - 1)
            if rank_of_stage[stage] != rank_of_stage[stage + 1]
        }
        first = self.given.mesh["pipeline"].mesh[0]
        name = f"{self.groups.share(lambda: uuid4().hex, 'A name of channels')}/{first}"
        rank = self.given.rank
        times = measure_links(list(links.values()), rank, name, self.given.device)
        own = (
            {stage: times[link] for stage, link in links.items() if link in times},
            {stage: self._measure_collectives(stage) for stage in placement.stages_of_rank(rank)},
        )
        after: dict[int, float] = {}
        collectives: dict[int, tuple[float, float]] = {}
        for links_of, collectives_of in self.groups.gather_in_pipeline(own):
            after |= links_of
            collectives |= collectives_of
        replicas = self.groups.gather((after, collectives), "measured links")
        one_way = [fmean([after_of.get(stage, 0.0) for after_of, _ in replicas]) for stage in range(num_stages)]
        # a stage sends values to the next one and gradients to the one before; the last one none, the first one none
        p2p, p2p_back = one_way, [0.0, *one_way[:-1]]
        gathers = [fmean([found[stage][0] for _, found in replicas]) for stage in range(num_stages)]
        reductions = [fmean([found[stage][1] for _, found in replicas]) for stage in range(num_stages)]
        return p2p, p2p_back, gathers, reductions

    def measure_copies(self, before: StageCosts) -> list[float]:
        """Milliseconds per stage to copy ``before.held_on_host`` GiB, the longest of all replicas; equal on all ranks.

        All ranks copy at once, as in a step: those of a node may share what leads to its memory. On a CPU nothing is
        measured, since copies are not made beside the computation there.
        """
        split = self.split
        resolved = before.per_stage(split.placement.num_stages)
        if self.given.device.type != "cuda" or not any(resolved.held_on_host):
            return list(resolved.offload)
        own = {
            stage: measure_host_copies(int(resolved.held_on_host[stage] * BYTES_PER_GIB), self.given.device)
            for stage in split.placement.stages_of_rank(self.given.rank)
            if resolved.held_on_host[stage]
        }
        everywhere = self.groups.gather(self.groups.gather_in_pipeline(own), "measured copies")
        found = [each for of_pipeline in everywhere for each in of_pipeline]
        return [max((each.get(stage, 0.0) for each in found), default=0.0) for stage in range(len(resolved.offload))]

    def _measure_collectives(self, stage: int) -> tuple[float, float]:
        """A gather and a reduction of the stage's parameters over the replicas."""
        if self.given.data_parallel.size() == 1:
            return 0.0, 0.0
        partition = self.split.partition
        num_parameters = sum(self.split.counted.num_parameters[unit] for unit in partition.units_of_stage(stage))
        itemsize = next((p.dtype.itemsize for p in self.split.module.parameters()), 4)
        group = self.given.data_parallel.get_group()
        return measure_gather_and_reduce(num_parameters * itemsize, group, self.given.device)
