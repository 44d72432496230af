"""Ways to write a training step, as users write them: each takes the module and a batch and returns the loss.

The data make every shortcut visible: the microbatches of a batch have different numbers of kept tokens, of valid
targets and of samples of each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import mse_loss as mean_square

STEPS: dict[str, Callable[[Any, Any], Any]] = {}
WIDTH, CLASSES, LENGTH = 8, 5, 6
IGNORED = -100


def additive(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step whose loss is a sum or a mean, however it is written."""
    STEPS[step.__name__] = step
    return step


def token_losses(module: Any, batch: Any, logits: Tensor | None = None) -> Tensor:
    """Of every token, [batch, length]."""
    logits = module(batch["x"]) if logits is None else logits
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="none").view(batch["mask"].shape)


# ------------------------------------------------------------------ means of torch


@additive
def imported_by_name(module: Any, batch: Any) -> Tensor:
    return cross_entropy(module(batch["x"]).flatten(0, 1), batch["label"].flatten(), ignore_index=IGNORED)


@additive
def loss_module(module: Any, batch: Any) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss()(module(batch["x"]).transpose(1, 2), batch["label"])
    return loss


@additive
def class_weights(module: Any, batch: Any) -> Tensor:
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    return cross_entropy(module(batch["x"]).flatten(0, 1), batch["label"].flatten(), weight=weight)


@additive
def label_smoothing(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"]).flatten(0, 1), batch["label"].flatten(), label_smoothing=0.1)


@additive
def log_softmax_and_nll(module: Any, batch: Any) -> Tensor:
    return F.nll_loss(F.log_softmax(module(batch["x"]), -1).flatten(0, 1), batch["label"].flatten())


@additive
def two_means(module: Any, batch: Any) -> Tensor:
    out = module(batch["x"])
    return cross_entropy(out.flatten(0, 1), batch["label"].flatten()) + 0.3 * mean_square(out, batch["soft"])


@additive
def selected_then_mean(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch)[batch["mask"].bool()].mean()


@additive
def selected_before_the_loss(module: Any, batch: Any) -> Tensor:
    kept = batch["mask"].bool()
    return mean_square(module(batch["x"])[kept], batch["soft"][kept])


@additive
def legacy_size_average(module: Any, batch: Any) -> Tensor:
    return F.mse_loss(module(batch["x"]), batch["soft"], size_average=False)


# ------------------------------------------------------------------ means by hand


@additive
def masked_mean(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"]
    return (token_losses(module, batch) * mask).sum() / mask.sum()


@additive
def masked_mean_with_item(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"]
    count = max(mask.sum().item(), 1)
    return (token_losses(module, batch) * mask).sum() / count


@additive
def masked_mean_clamped(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"]
    return torch.sum(token_losses(module, batch) * mask) / mask.sum().clamp(min=1)


@additive
def masked_mean_with_epsilon(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"]
    return (token_losses(module, batch) * mask).sum() / (mask.sum() + 1e-3)


@additive
def integer_count(module: Any, batch: Any) -> Tensor:
    kept = batch["label"] != IGNORED
    losses = F.cross_entropy(
        module(batch["x"]).flatten(0, 1), batch["label"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return losses / kept.sum()


@additive
def weighted_mean(module: Any, batch: Any) -> Tensor:
    losses = token_losses(module, batch).mean(1)
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


@additive
def normalised_weights(module: Any, batch: Any) -> Tensor:
    weight = batch["weight"] / batch["weight"].sum()
    return (token_losses(module, batch).mean(1) * weight).sum()


@additive
def weights_with_mean_one(module: Any, batch: Any) -> Tensor:
    weight = batch["weight"] / batch["weight"].mean()
    return (token_losses(module, batch).mean(1) * weight).mean()


@additive
def dot_product(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).mean(1) @ batch["weight"] / batch["weight"].sum()


@additive
def einsum_of_weights(module: Any, batch: Any) -> Tensor:
    return torch.einsum("bt,b->", token_losses(module, batch), batch["weight"]) / (LENGTH * batch["weight"].sum())


@additive
def two_masked_means_added(module: Any, batch: Any) -> Tensor:
    losses, mask = token_losses(module, batch), batch["mask"]
    inverse = 1 - mask
    return (losses * mask).sum() / mask.sum() + 0.5 * (losses * inverse).sum() / inverse.sum()


@additive
def masked_mean_by_sample(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"]
    return ((token_losses(module, batch) * mask).sum(1) / mask.sum(1)).mean()


@additive
def balanced_by_counts_in_the_batch(module: Any, batch: Any) -> Tensor:
    counts = torch.bincount(batch["target"].flatten(), minlength=CLASSES)
    weight = (1.0 / (counts + 1)).double()
    return (token_losses(module, batch) * weight[batch["target"]]).sum()


@additive
def class_weights_from_the_batch(module: Any, batch: Any) -> Tensor:
    counts = torch.bincount(batch["target"].flatten(), minlength=CLASSES)
    weight = (counts.sum() / (counts + 1)).double()
    return cross_entropy(module(batch["x"]).flatten(0, 1), batch["label"].flatten(), weight=weight)


@additive
def class_weights_scattered_into_ones(module: Any, batch: Any) -> Tensor:
    target = batch["target"].flatten()
    counts = torch.ones(CLASSES, dtype=torch.float64).index_add_(0, target, torch.ones(len(target)).double())
    return (token_losses(module, batch) / counts[batch["target"]]).sum()


@additive
def losses_by_class_scattered_into_zeros(module: Any, batch: Any) -> Tensor:
    target, losses = batch["target"].flatten(), token_losses(module, batch).flatten()
    by_class = torch.scatter_add(torch.zeros(CLASSES, dtype=losses.dtype), 0, target, losses)
    return by_class.mul(torch.arange(CLASSES)).sum() / len(target)


@additive
def counts_of_absent_classes_set(module: Any, batch: Any) -> Tensor:
    classes = F.one_hot(batch["target"], CLASSES)
    counts = classes.sum((0, 1))
    counts[counts == 0] = 1
    return ((token_losses(module, batch)[..., None] * classes).sum((0, 1)) / counts).sum()


@additive
def all_losses_by_a_count_that_may_be_none(module: Any, batch: Any) -> Tensor:
    losses, count = token_losses(module, batch).sum(), (batch["target"][:, 0] == 1).sum()
    return torch.where(count == 0, losses * 0, losses / count.clamp(min=1))


@additive
def division_that_is_zero_by_zero(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"] * (batch["target"] == 1)
    total, count = (token_losses(module, batch) * mask).sum(), mask.sum()
    return torch.where(count == 0, torch.zeros_like(total * count), total / count)


@additive
def scaled_by_the_largest_weight(module: Any, batch: Any) -> Tensor:
    return (token_losses(module, batch).mean(1) * batch["weight"] / batch["weight"].max()).mean()


@torch.compile(backend="aot_eager")
def compiled_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


@additive
def compiled_function(module: Any, batch: Any) -> Tensor:
    return compiled_mean(token_losses(module, batch), batch["mask"])


# ------------------------------------------------------------------ sums, and numbers of samples


@additive
def sum_of_torch(module: Any, batch: Any) -> Tensor:
    return F.mse_loss(module(batch["x"]), batch["soft"], reduction="sum")


@additive
def sum_of_losses(module: Any, batch: Any) -> Tensor:
    loss: Tensor = token_losses(module, batch).sum()
    return loss


@additive
def norms_with_exponent_one(module: Any, batch: Any) -> Tensor:
    losses = token_losses(module, batch)
    return torch.linalg.vector_norm(losses, ord=1) + losses.norm(1, dim=1).mean() + losses.norm(p=1) / len(batch["x"])


@additive
def sum_and_mean_added(module: Any, batch: Any) -> Tensor:
    losses = token_losses(module, batch)
    return losses.mean() + 0.01 * losses.sum()


@additive
def sum_by_batch_size(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).sum() / batch["x"].size(0)


@additive
def sum_by_length(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).sum() * (1.0 / len(batch["x"]))


@additive
def sum_by_number_of_elements(module: Any, batch: Any) -> Tensor:
    losses = token_losses(module, batch)
    return losses.sum() / losses.numel()


@additive
def rows_by_batch_size(module: Any, batch: Any) -> Tensor:
    return (token_losses(module, batch) / batch["x"].shape[0]).sum() / LENGTH


@additive
def square_of_the_batch(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).sum() * batch["x"].shape[0] / 100


@additive
def root_of_the_batch_size(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).sum() / math.sqrt(batch["x"].shape[0])


@additive
def size_as_a_tensor(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).sum() / torch.tensor(float(batch["x"].shape[0]), dtype=torch.float64)


@additive
def loss_by_sample_in_a_loop(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    return torch.stack([cross_entropy(a, b) for a, b in zip(logits, batch["label"], strict=True)]).mean()


@additive
def sum_in_a_loop(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    losses = [cross_entropy(a, b) for a, b in zip(logits, batch["target"], strict=True)]
    return sum(losses) / len(losses)  # type: ignore[return-value]


@additive
def grown_in_a_loop(module: Any, batch: Any) -> Tensor:
    logits, total = module(batch["x"]), torch.zeros((), dtype=torch.float64)
    for index in range(len(logits)):
        total = total + cross_entropy(logits[index], batch["target"][index]) / len(logits)
    return total


@additive
def penalty_on_weights(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).mean() + 1e-2 * module.head.weight.square().sum()


@additive
def penalty_on_activations(module: Any, batch: Any) -> Tensor:
    out = module(batch["x"])
    return cross_entropy(out.flatten(0, 1), batch["label"].flatten()) + 1e-3 * out.abs().sum() / len(out)


# ------------------------------------------------------------------ further ways


@additive
def focal(module: Any, batch: Any) -> Tensor:
    losses = token_losses(module, batch)
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


@additive
def where_and_count_nonzero(module: Any, batch: Any) -> Tensor:
    kept = batch["mask"].bool()
    return torch.where(kept, token_losses(module, batch), 0.0).sum() / torch.count_nonzero(kept)


@additive
def masked_select(module: Any, batch: Any) -> Tensor:
    return token_losses(module, batch).masked_select(batch["mask"].bool()).mean()


@additive
def divided_in_place(module: Any, batch: Any) -> Tensor:
    loss: Tensor = (token_losses(module, batch) * batch["mask"]).sum()
    loss /= batch["mask"].sum().clamp_(min=1.0)
    return loss


@additive
def integer_of_the_count(module: Any, batch: Any) -> Tensor:
    return (token_losses(module, batch) * batch["mask"]).sum() / int(batch["mask"].sum())


@additive
def count_as_float(module: Any, batch: Any) -> Tensor:
    return (token_losses(module, batch) * batch["mask"]).sum() / float((batch["label"] != IGNORED).sum())


@additive
def weights_scaled_to_the_batch(module: Any, batch: Any) -> Tensor:
    weight = batch["weight"] / batch["weight"].sum() * len(batch["weight"])
    return (token_losses(module, batch).mean(1) * weight).mean()


@additive
def positives_weighed_by_the_batch(module: Any, batch: Any) -> Tensor:
    label = (batch["soft"] > 0.7).double()
    positive = label.sum()
    weight = (label.numel() - positive) / positive
    return F.binary_cross_entropy_with_logits(module(batch["x"]), label, pos_weight=weight)


@additive
def kl_by_batch(module: Any, batch: Any) -> Tensor:
    return F.kl_div(F.log_softmax(module(batch["x"]), -1), batch["soft"].softmax(-1), reduction="batchmean")


@additive
def gaussian_likelihood(module: Any, batch: Any) -> Tensor:
    out = module(batch["x"])
    return F.gaussian_nll_loss(out, batch["soft"], out.detach().exp())


@additive
def masked_mean_by_whole_numbers(module: Any, batch: Any) -> Tensor:
    mask = batch["mask"]
    weights = 1 + torch.bincount(batch["target"].flatten(), minlength=CLASSES).int()
    losses = token_losses(module, batch) / weights[batch["target"]]
    return (losses * mask).sum() / mask.sum().to(torch.int64).clamp(min=1)


@additive
def triplets_of_rows(module: Any, batch: Any) -> Tensor:
    out = module(batch["x"])
    return nn.TripletMarginLoss(margin=0.5)(out[:, 0], out[:, 1], out[:, 2])


@additive
def connectionist(module: Any, batch: Any) -> Tensor:
    log_probs = module(batch["x"]).log_softmax(-1).transpose(0, 1)
    targets = batch["target"][:, :2].clamp(min=1)
    lengths = 1 + (batch["weight"] > 0.5).long()
    return F.ctc_loss(log_probs, targets, torch.full((len(targets),), LENGTH), lengths, zero_infinity=True)


@additive
def parts_in_a_dict(module: Any, batch: Any) -> Tensor:
    losses = token_losses(module, batch)
    parts = {
        "all": losses.mean(),
        "masked": (losses * batch["mask"]).sum() / batch["mask"].sum(),
        "two": 0.1 * losses.sum(),
    }
    return sum(parts.values())  # type: ignore[return-value]


@additive
def two_counts_in_a_loop(module: Any, batch: Any) -> Tensor:
    losses, total = token_losses(module, batch), 0
    for chosen in range(CLASSES):  # a mean for each class, over the batch
        kept = (batch["target"] == chosen).double()
        total = total + (losses * kept).sum() / kept.sum().clamp(min=1)
    return total / CLASSES  # type: ignore[return-value]


@additive
def accumulated_over_chunks(module: Any, batch: Any) -> Tensor:
    losses, total, count = token_losses(module, batch), 0.0, 0.0
    for position in range(LENGTH):
        total = total + (losses[:, position] * batch["mask"][:, position]).sum()
        count = count + batch["mask"][:, position].sum()
    return total / count  # type: ignore[return-value]


@additive
def vocabulary_penalty(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    z = torch.logsumexp(logits, -1)
    return (
        cross_entropy(logits.flatten(0, 1), batch["label"].flatten())
        + 1e-2 * (z**2 * batch["mask"]).sum() / batch["mask"].sum()
    )


# ------------------------------------------------------------------ logs


@additive
def logs_of_all_kinds(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    right = (logits.argmax(-1) == batch["target"]).double()
    module.log("accuracy", right.mean())
    module.log("accuracy_by_hand", right.sum().item() / right.numel())
    module.log("num_right", right.sum(), reduce_fx="sum")
    module.log("masked_accuracy", (right * batch["mask"]).sum() / batch["mask"].sum())
    module.log("num_kept", batch["mask"].sum())
    module.log("num_samples", len(batch["x"]))
    module.log("num_samples_summed", float(len(batch["x"])), reduce_fx="sum")
    module.log("count", float(len(batch["x"])), reduce_fx="sum", on_step=True, on_epoch=True)
    module.log("largest", logits.max())
    module.log("least", logits.detach().min(), reduce_fx="min")
    module.log("constant", 0.5)
    losses = token_losses(module, batch, logits)
    module.log_dict({"sum": losses.sum(), "mean": losses.mean()})
    return losses.mean()


@additive
def dict_with_parts(module: Any, batch: Any) -> Any:
    losses = token_losses(module, batch)
    return {"loss": losses.sum() / 10, "total": losses.sum().detach(), "mean": losses.mean().detach()}
