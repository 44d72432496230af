"""LightningModules of many kinds, written as users write them, with batches; none knows of pipelines.

``ARCHITECTURES`` maps a name to what makes the module, what makes a batch of some samples, and the microbatches that
leave its mathematics as it is (one, where a loss looks at all samples of a batch at once).

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from model_parts import StateSpaceLayer
from text_models import RoutedExperts
from torch import Tensor, nn

VOCAB = 32
WIDTH = 12


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


class Trained(L.LightningModule):
    """What all share: SGD on what trains."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class LanguageModel(Trained):
    def logits(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.logits(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits = self.logits(batch[:, :-1])
        right = (logits.argmax(-1) == batch[:, 1:]).double().mean()
        self.log_dict({"val_loss": F.cross_entropy(logits.transpose(1, 2), batch[:, 1:]), "val_right": right})

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.logits(batch)


class Classifier(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, label = batch
        loss = F.cross_entropy(self(image), label)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, label = batch
        self.log("val_loss", F.cross_entropy(self(image), label))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(-1)


class WindowAttention(nn.Module):
    """Attention within shifted windows, with a bias for each pair of places."""

    def __init__(self, width: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(window * window, window * window) * 0.1)
        self.register_buffer("places", torch.arange(window * window))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        size = self.window
        h = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        h = h.view(batch, height // size, size, width // size, size, channels).transpose(2, 3)
        q, k, v = self.qkv(h.reshape(-1, size * size, channels)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / channels**0.5 + self.bias[self.places]).softmax(-1)
        h = self.out(weights @ v).view(batch, height // size, width // size, size, size, channels)
        return x + torch.roll(h.transpose(2, 3).reshape(x.shape), (self.shift, self.shift), (1, 2))


class Windows(Classifier):
    """Swin-like: stages in a list of dicts, patches merged by the code between."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.stages = nn.ModuleList(
            nn.ModuleDict(
                {
                    "blocks": nn.ModuleList(WindowAttention(width, 2, shift) for shift in (0, 1)),
                    "merge": nn.Linear(4 * width, 2 * width),
                }
            )
            for width in (8, 16)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).permute(0, 2, 3, 1)
        for stage in self.stages:
            for block in stage["blocks"]:
                x = block(x)
            x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
            x = stage["merge"](x)
        return self.head(x.mean((1, 2)))


class TimedBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(16, outputs)
        self.norm = nn.GroupNorm(2, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.skip(x) + F.silu(self.norm(self.first(x) + self.time(time)[:, :, None, None]))


class Diffusion(Trained):
    """A U-Net with attention and an embedding of the time, which all its blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(8, 8), TimedBlock(8, 16)])
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ModuleList([TimedBlock(32, 8), TimedBlock(16, 8)])
        self.last = nn.Conv2d(8, 3, 1)
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 20))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(-torch.arange(4, device=x.device) / 2.0)
        embedded = self.embed_time(torch.cat([waves.sin(), waves.cos()], -1).to(x.dtype))
        h, skips = self.first(x), []
        for block in self.down:
            h = block(h, embedded)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attention(tokens, tokens, tokens)[0].transpose(1, 2).view_as(h)
        for block in self.up:
            h = block(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1), embedded)
        return self.last(h)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        image, noise = batch["image"], batch["image"].flip(-1)
        kept = self.kept[batch["time"]].view(-1, 1, 1, 1)
        return F.mse_loss(self(kept.sqrt() * image + (1 - kept).sqrt() * noise, batch["time"]), noise)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["image"], batch["time"])


class StateSpace(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(StateSpaceLayer(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def logits(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Recurrent(LanguageModel):
    """Recurrent layers that hand states to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.third = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        h, (hidden, cell) = self.first(self.embedding(tokens))
        second, _ = self.second(h, (hidden.repeat(2, 1, 1), cell.repeat(2, 1, 1)))
        return self.head(self.third(second + h, hidden)[0])


class Experts(RoutedExperts):
    """The balance of the experts' load is left in an attribute."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change, self.balance = super().forward(x)
        return x + change


class MixtureOfExperts(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        balance = torch.stack([module.balance for module in self.modules() if isinstance(module, Experts)]).mean()
        self.log("balance", balance)
        return loss + 0.1 * balance


class Bootstrap(Trained):
    """BYOL: a target network follows the online one after every batch, parameter by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.online = mlp(6, 8, 8, 8)
        self.predictor = mlp(8, 8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = batch
        with torch.no_grad():
            target = self.target(other)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(one)), target, dim=-1).mean()

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.mul_(0.9).add_(online, alpha=0.1)


class MomentumContrast(Bootstrap):
    """MoCo: the key encoder follows within the step, by ``.data``; negatives come from a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(8, 10), dim=0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
                target.data = target.data * 0.9 + online.data * 0.1
            key = F.normalize(self.target(batch[1]), dim=1)
        query = F.normalize(self.predictor(self.online(batch[0])), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Queued(MomentumContrast):
    """The step writes keys into the queue, at a place that it reads from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = int(self.place)
        self.queue[:, first] = F.normalize(batch[1].flatten()[:8], dim=0)
        self.place[0] = (first + 1) % 10
        return super().training_step(batch, batch_idx)


class Averaged(Classifier):
    """An average of the weights that only validation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), mlp(48, 8, 8), mlp(8, 5))
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.head = nn.Linear(5, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head((self.net if self.training else self.average)(image))

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        current = dict(self.net.named_parameters())
        for name, parameter in self.average.named_parameters():
            parameter.lerp_(current[name], 0.2)


class Distilled(Classifier):
    """A frozen teacher, and two losses weighed by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Flatten(), mlp(48, 16, 16, 5)).eval().requires_grad_(False)
        self.student = nn.Sequential(nn.Flatten(), mlp(48, 8, 8, 5))
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, image: Tensor) -> Tensor:
        return self.student(image)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, label = batch
        with torch.no_grad():
            target = self.teacher(image).softmax(-1)
        logits = self(image)
        losses = torch.stack(
            [F.kl_div(logits.log_softmax(-1), target, reduction="batchmean"), F.cross_entropy(logits, label)]
        )
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


class Perceiver(Trained):
    """Latents of the root read padded tokens, which every cross attention needs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.reads = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.thinks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        context = self.embedding(tokens)
        h = self.latents.expand(len(tokens), -1, -1)
        for read, think in zip(self.reads, self.thinks, strict=True):
            h = think(h + read(h, context, context, key_padding_mask=~mask, need_weights=False)[0])
        return self.head(h.mean(1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self(batch["tokens"], batch["mask"]), batch["label"])}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["tokens"], batch["mask"]), batch["label"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"scores": self(batch["tokens"], batch["mask"]), "label": batch["label"]}


class Detector(Trained):
    """DETR-like: queries of the root, and lists of targets of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.queries = nn.Embedding(4, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.boxes = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        features = self.backbone(torch.stack(images)).flatten(2).transpose(1, 2)
        queries = self.queries.weight.expand(len(images), -1, -1)
        boxes = self.boxes(self.transformer(features, queries)).sigmoid()
        losses = []
        for found, target in zip(boxes, targets, strict=True):
            matched = torch.cdist(found, target["boxes"], p=1).argmin(0)
            losses.append((found[matched] - target["boxes"]).abs().sum())
        return torch.stack(losses).mean()


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    @property
    def weight(self) -> Tensor:  # torch's encoder layers ask for it
        return self.base.weight + self.b @ self.a

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Adapted(LanguageModel):
    """A frozen language model with low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(4)]
        parts = {"embedding": nn.Embedding(VOCAB, WIDTH), "layers": nn.ModuleList(layers)}
        self.model = nn.ModuleDict({**parts, "head": nn.Linear(WIDTH, VOCAB)}).requires_grad_(False)
        for layer in layers:
            layer.linear1 = LowRank(layer.linear1)

    def logits(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        h = self.model["embedding"](tokens)
        for layer in self.model["layers"]:
            h = layer(h, src_mask=mask.to(h.dtype), is_causal=True)
        return self.model["head"](h)


class Modulated(Classifier):
    """Layers that are called with other weights than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(48, 8), mlp(8, 8), mlp(8, 8)])
        self.shift = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        h = image.flatten(1)
        for block in self.blocks:
            h = torch.func.functional_call(block, {"0.0.bias": block[0][0].bias + self.shift}, (h,))
        return self.head(h)


class Growing(Classifier):
    """Deeper in the second epoch, another head for every other batch, and more of the image as the training goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
        self.depth = 2

    def forward(self, image: Tensor, head: int = 0) -> Tensor:
        h = self.first(image)
        for block in self.blocks[: self.depth]:
            h = h + block(h)
        return self.heads[head](h.mean((2, 3)))

    def on_train_epoch_start(self) -> None:
        self.depth = 2 * (1 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        size = min(4 + self.global_step, 8)
        return F.cross_entropy(self(batch[0][..., :size], batch_idx % 2), batch[1])


class Tasks(Trained):
    """The batch says which task its samples are of, and how many of a sample's places are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(mlp(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleDict({"one": nn.Linear(WIDTH, 3), "other": nn.Linear(WIDTH, 3)})

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        lengths = batch["mask"].sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(batch["tokens"]), lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        for block in self.blocks:
            h = h + block(h)
        task = "one" if batch["task"][0] else "other"
        return self.heads[task](h[torch.arange(len(h)), lengths - 1])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch), batch["label"] % 3)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class GraphLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.message = nn.Linear(inputs, outputs)
        self.own = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        messages = self.message(x)[edges[0]]
        return F.relu(self.own(x).index_add(0, edges[1], messages))


class Graph(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(6, 8), GraphLayer(8, 8), GraphLayer(8, 8)])
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = batch["nodes"]
        for layer in self.layers:
            h = layer(h, batch["edges"])
        return F.cross_entropy(self.head(h), batch["label"])


def tokens(count: int) -> Tensor:
    return torch.randint(1, VOCAB, (count, 8))


def images(size: int) -> Callable[[int], Any]:
    return lambda count: (torch.randn(count, 3, size, size), torch.randint(0, 5, (count,)))


def padded(count: int) -> dict[str, Tensor]:
    mask = torch.arange(8) < torch.randint(3, 9, (count, 1))
    return {"tokens": tokens(count), "mask": mask, "label": torch.randint(0, 5, (count,))}


def of_a_task(count: int) -> dict[str, Tensor]:
    return {**padded(count), "task": torch.randint(0, 2, (1,)).expand(count)}


def targets(count: int) -> Any:
    lengths = torch.randint(1, 4, (count,)).tolist()
    return [torch.randn(3, 8, 8) for _ in lengths], [{"boxes": torch.rand(length, 4)} for length in lengths]


def graph(count: int) -> dict[str, Tensor]:
    edges = torch.randint(0, 10, (2, 20 + count))
    return {"nodes": torch.randn(10, 6), "edges": edges, "label": torch.randint(0, 3, (10,))}


class Entry(NamedTuple):
    make: Callable[[], L.LightningModule]
    batch: Callable[[int], Any]
    num_microbatches: int = 3


def pair(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randn(count, 6)


ARCHITECTURES: dict[str, Entry] = {
    "windows": Entry(Windows, images(16)),
    "diffusion": Entry(Diffusion, lambda n: {"image": torch.randn(n, 3, 8, 8), "time": torch.randint(0, 20, (n,))}),
    "state_space": Entry(StateSpace, tokens),
    "recurrent": Entry(Recurrent, tokens),
    "mixture_of_experts": Entry(MixtureOfExperts, tokens, 1),
    "bootstrap": Entry(Bootstrap, pair),
    "momentum_contrast": Entry(MomentumContrast, pair),
    "queued": Entry(Queued, pair, 1),
    "averaged": Entry(Averaged, images(4)),
    "distilled": Entry(Distilled, images(4)),
    "perceiver": Entry(Perceiver, padded),
    "detector": Entry(Detector, targets),
    "adapted": Entry(Adapted, tokens),
    "modulated": Entry(Modulated, images(4)),
    "growing": Entry(Growing, images(8)),
    "tasks": Entry(Tasks, of_a_task),
    "graph": Entry(Graph, graph, 1),
}
