"""Hooks of the module around the update, where replicas share a stage and its parameters lie in shards."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from feature_parts import Data, assert_equal_trees, make, plain
from feature_parts import make_unchecked_trainer as make_trainer
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities import grad_norm as norms_of
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor, nn

LAYOUT = Layout("1f1b", 2, 2, 2)


class ScalesGradients(Classifier):
    """Edits gradients before the update, by their own size."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.05, 0.05)
                parameter.grad.div_(1 + parameter.grad.square().sum().sqrt())


class WarmsUp(Classifier):
    """The recipe of Lightning's documentation: a learning rate set in ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = self.lr / (1 + self.trainer.global_step)


class SkipsUpdates(Classifier):
    """Updates with every other batch; the closure runs all the same."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class ClampsWeights(Classifier):
    """Weights are clamped after every update, all of them and those of one layer further."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)
            self.layers[4].weight.clamp_(-0.1, 0.1)


class NormalizesWeights(Classifier):
    """Rows of every matrix are divided by their length, and each matrix by its own."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.div_(parameter.norm(dim=1, keepdim=True).clamp_min(1.0))
                    parameter.mul_(1 / parameter.norm().clamp_min(1.0))


class FollowsItself(Classifier):
    """A target network that follows the online one by ``lerp_`` after every batch, and that the loss looks at."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.layers.parameters(), strict=True):
                target.lerp_(online, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, self.target(batch[0]))

    def on_train_batch_end(self, *args: Any) -> None:
        self.follow()


class FollowsWithUpdate(FollowsItself):
    """The same in ``optimizer_step``, around the update."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.follow()

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class FollowsInBetween(FollowsWithUpdate):
    """In each of the other hooks around the update; the closure follows as well."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.follow()
            return loss

        optimizer.step(closure=closure)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.follow()

    def on_before_backward(self, loss: Tensor) -> None:
        self.follow()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.follow()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class FollowsWhenZeroing(FollowsWithUpdate):
    """On one device between forward and backward."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.follow()


class FollowsInStep(FollowsItself):
    """The same at the start of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class FollowsThenReads(FollowsItself):
    """At last its hook reads what only a step leaves."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.left = loss.detach()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.follow()
        self.seen = 2 * self.left


class ReadsThenFollows(FollowsThenReads):
    """It cannot be run before training, so nothing is known of what it does."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen = 2 * self.left
        self.follow()


class Follows(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        for target, online in zip(module.target.parameters(), module.layers.parameters(), strict=False):
            target.data = 0.9 * target.data + 0.1 * online.data


class FollowedByCallback(FollowsItself):
    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def configure_callbacks(self) -> list[L.Callback]:
        return [Follows()]


class FollowsAnotherUnit(Classifier):
    """A frozen root parameter that follows the weights of a block on another stage than the one that reads it."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.shadow = nn.Parameter(torch.zeros(10, 10), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.layers[:5](batch[0])
        return F.cross_entropy(self.layers[5:](h + h.tanh() @ self.shadow), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.shadow.mul_(0.5).add_(self.layers[2].weight, alpha=0.5)


class AveragesIntoABuffer(Classifier):
    """A buffer that follows the weights of a block."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.register_buffer("average", torch.zeros(10, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.layers[:5](batch[0])
        return F.cross_entropy(self.layers[5:](h + h.tanh() @ self.average), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.average.lerp_(self.layers[2].weight, 0.5)  # the line that the message names


class AveragesByName(Classifier):
    """Averages of all parameters that there are, in buffers, as latent-diffusion keeps them."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        for name, parameter in self.layers.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                getattr(self, name.replace(".", "_")).lerp_(parameter, 0.5)


class SetsData(Classifier):
    """Gives each parameter other data after every update: its own clamped, and constants of the whole shape."""

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)
        last = self.layers[4].bias
        last.data = torch.linspace(-0.1, 0.1, last.numel(), dtype=last.dtype)


HOOKS = {
    kind.__name__: kind
    for kind in (
        ScalesGradients,
        WarmsUp,
        SkipsUpdates,
        ClampsWeights,
        NormalizesWeights,
        SetsData,
        FollowsItself,
        FollowsWithUpdate,
        FollowsInBetween,
        FollowsInStep,
        FollowsThenReads,
        FollowsAnotherUnit,
    )
}


class LogsNorms(Classifier):
    """Lightning's own way to watch gradients: of the whole module, and of a part that lies on two stages."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.twin = nn.Linear(10, 10)
        self.twin.weight = self.layers[2].weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.layers[:6](batch[0])
        loss = F.cross_entropy(self.layers[6](torch.tanh(self.twin(h))), batch[1])
        self.log("train_loss", loss)
        return loss

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[6](torch.tanh(self.twin(self.layers[:6](x))))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log("part", L.utilities.grad_norm(self.layers[2:5], "inf")["grad_inf_norm_total"])
        self.log("block", norms_of(self.layers, 1)["grad_1.0_norm_total"])


class WatchesNorms(L.Callback):
    """Has what was logged after every batch."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.logged.append(plain(dict(trainer.callback_metrics)))


def watch_norms(layout: Layout | None, sharding: Any = "replicate") -> Any:
    strategy = {} if layout is None else {"strategy": layout.strategy(sharding=sharding, check_first_batches=False)}
    watches = WatchesNorms()
    make_trainer(layout, callbacks=[watches], gradient_clip_val=0.1, **strategy).fit(make(LogsNorms), Data(24))
    return watches.logged


@pytest.mark.parametrize("sharding", [pytest.param("replicate", marks=pytest.mark.nightly), "full_shard"])
def test_grad_norm_is_that_of_one_device_on_every_rank(pool: WorkerPool, sharding: str) -> None:
    expected = watch_norms(None)
    assert {"grad_2.0_norm_total", "grad_2.0_norm/layers.6.bias", "part", "block"} <= expected[0].keys()
    assert "grad_2.0_norm/twin.weight" not in expected[0], "a tied weight goes by its first name"
    for found in pool.run(watch_norms, LAYOUT, sharding, world_size=4, timeout=120):
        mine = [{key: value for key, value in logged.items() if "loss" not in key} for logged in found]
        theirs = [{key: value for key, value in logged.items() if "loss" not in key} for logged in expected]
        assert_equal_trees(mine, theirs, tolerance=1e-6)  # the total is float32 in Lightning
    assert (
        grad_norm.__module__ == "lightning.pytorch.utilities.grads" and grad_norm is norms_of is L.utilities.grad_norm
    )


class LogsSizes(Classifier):
    """Logs what is of its own stage only, beside what every stage has."""

    def on_after_backward(self) -> None:
        self.log("batches", float(self.trainer.global_step))
        self.log("size", sum(float(p.square().sum()) for p in self.parameters()))


class LogsSteps(Classifier):
    """Logs what every stage has."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("steps", float(self.trainer.global_step))


def warnings_of(kind: type[Classifier], layout: Layout) -> list[str]:
    """In a worker: what is warned of in a training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(kind, layout)
    return [str(warning.message) for warning in caught if "is not the same on all stages" in str(warning.message)]


def test_a_hook_that_logs_other_values_on_other_stages_is_told_of_once(pool: WorkerPool) -> None:
    layout = Layout("1f1b", 2, 1, 2)
    first, second = pool.run(warnings_of, LogsSizes, layout, world_size=2, timeout=60)
    assert second == [] and len(first) == 1
    assert re.search(
        r"self\.log\('size', \.\.\.\) in on_after_backward is not the same .*: [\d.]+, [\d.]+ on", first[0]
    )
    assert pool.run(warnings_of, LogsSteps, layout, world_size=2, timeout=60) == [[], []]
    assert pool.run(warnings_of, LogsNorms, layout, world_size=2, timeout=60) == [[], []]


def train(kind: type[Classifier], layout: Layout | None = None, sharding: Any = "replicate") -> Any:
    strategy = {} if layout is None else {"strategy": layout.strategy(sharding=sharding, check_first_batches=False)}
    trainer, module = make_trainer(layout, **strategy), make(kind)
    trainer.fit(module, Data(num_train=24))
    return {
        "weights": whole_weights(module),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


# each kind of hook in one of the modes, the rest at night
BY_MODE = {
    "replicate": ("WarmsUp", "ScalesGradients", "FollowsAnotherUnit"),
    "shard_grad_op": ("FollowsItself",),
    "full_shard": (
        "SkipsUpdates",
        "ClampsWeights",
        "NormalizesWeights",
        "FollowsItself",
        "FollowsInStep",
        "FollowsThenReads",
    ),
}
CASES = [
    pytest.param(hooks, mode, marks=[] if hooks in of_mode else pytest.mark.nightly)
    for mode, of_mode in BY_MODE.items()
    for hooks in HOOKS
]


def check_weights(pool: WorkerPool, hooks: str, layout: Layout, sharding: str) -> None:
    expected = train(HOOKS[hooks])
    found: dict[str, Tensor] = {}
    for result in pool.run(train, HOOKS[hooks], layout, sharding, world_size=layout.world_size, timeout=120):
        assert result["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
        assert result["lr"] == expected["lr"]
        found |= result["weights"]
    assert_equal_trees(found, expected["weights"])


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("hooks", "sharding"), CASES)
def test_weights_are_those_of_one_device(pool: WorkerPool, hooks: str, sharding: str) -> None:
    check_weights(pool, hooks, LAYOUT, sharding)


def test_data_that_a_hook_sets_are_those_of_one_device(pool: WorkerPool) -> None:
    check_weights(pool, "SetsData", LAYOUT, "shard_grad_op")


@pytest.mark.parametrize("hooks", ["FollowsWithUpdate", "FollowsInBetween"])
def test_averages_around_the_update_are_those_of_one_device(pool: WorkerPool, hooks: str) -> None:
    check_weights(pool, hooks, Layout("1f1b", 2, 1, 4), "replicate")


def test_averages_made_while_gradients_are_zeroed_are_refused(pool: WorkerPool) -> None:
    told = pool.refusals("ConfigurationError", train, FollowsWhenZeroing, Layout("1f1b", 2, 1, 2), world_size=2)
    assert all("optimizer_zero_grad of FollowsWhenZeroing writes into parameters ('target." in text for text in told)


def test_averages_of_what_each_rank_has_are_refused(pool: WorkerPool) -> None:
    told = pool.refusals("SplitError", train, AveragesByName, Layout("1f1b", 2, 1, 2), world_size=2)
    assert all(
        "The buffer '0_weight' has become another one on rank 0 than on rank 1 of a pip" in text for text in told
    )


def notes_of_a_failure() -> list[str]:
    """In a worker."""
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
        train(AveragesByName, LAYOUT, "full_shard")
    return list(getattr(caught.value, "__notes__", ()))


def test_what_mixes_shards_with_tensors_is_told_what_to_do(pool: WorkerPool) -> None:
    for notes in pool.run(notes_of_a_failure, world_size=4, timeout=60):
        assert any("Between calls of its unit a parameter is a shard" in note for note in notes)


def test_an_average_in_a_buffer_is_refused(pool: WorkerPool) -> None:
    """Other stages have the buffer too, and no parameter to follow."""
    report = pool.run(
        train, AveragesIntoABuffer, Layout("1f1b", 2, 1, 2), world_size=2, timeout=60, expect_failure=True
    )
    with open(__file__) as source:
        line = next(number for number, text in enumerate(source, 1) if "# the line that the message names" in text)
    failure = report.failures[1]  # the rank without the block
    assert failure is not None and report.failures[0] is not None
    assert failure.type == "LostEditError"
    assert re.search(
        rf"test_update_hooks\.py:{line} in on_train_batch_end computes from parameters of another .*shape \(10, 10\)",
        failure.message,
    )
    assert "a Parameter with requires_grad=False" in failure.message
    assert report.seconds < 15


@pytest.mark.parametrize(
    ("kind", "where"), [(ReadsThenFollows, "in follow"), (FollowedByCallback, "Follows.on_train_")]
)
def test_a_zip_of_parameters_is_not_one_of_a_stage(pool: WorkerPool, kind: type[Classifier], where: str) -> None:
    """A rank has some of each list, so pairs would be others than on one device."""
    told = pool.refusals(None, train, kind, Layout("1f1b", 2, 1, 2), world_size=2, timeout=60)
    assert any(where in text and "computes from parameters of another stage" in text for text in told), told
    assert any("on_train_batch_end of the module, before that hook reads anything" in text for text in told), told
