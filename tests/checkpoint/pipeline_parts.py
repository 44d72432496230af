"""A small LightningModule, and what each rank of a pipeline holds of it."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.checkpoint.reading.open import open_checkpoint
from lightning_pp.checkpoint.writing.sharded import prepare_save
from lightning_pp.checkpoint.writing.single_file import gather_full_optimizer_state, gather_full_state

WIDTH = 5  # odd, so that shards over two ranks are uneven
VOCABULARY = 11


class Counter(nn.Module):
    """Has extra state that is neither a parameter nor a buffer, and holds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"count": 0, "last": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.state = state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counter.state = {"count": self.counter.state["count"] + 1, "last": x.detach().flatten()[:2].clone()}
        return x + self.norm(self.linear(x).relu())


class RowNormalized(torch.optim.Optimizer):
    """Keeps state of another shape than the parameter's, lists of tensors, and what is not a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "rule": {"power": 2}})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if parameter.ndim > 1:
                    mean = gradient.pow(group["rule"]["power"]).mean(dim=-1, keepdim=True)
                    state["row_mean"] = mean if "row_mean" not in state else state["row_mean"].lerp(mean, 0.5)
                    gradient = gradient / state["row_mean"].sqrt()
                state["last"] = {
                    "gradients": [*state.get("last", {"gradients": []})["gradients"][-1:], gradient.clone()]
                }
                state["note"] = {"steps": state.get("note", {"steps": 0})["steps"] + 1, "empty": {}}
                parameter.sub_(gradient, alpha=group["lr"])


class Model(L.LightningModule):
    """Token classifier; with ``tied`` the head's weight is the embedding's."""

    def __init__(
        self, optimizer: str = "adamw", tied: bool = True, num_blocks: int = 3, width_of_norm: int = WIDTH
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width_of_norm)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.tensor(1.5))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        tokens, target = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)) / self.temperature, target)

    def configure_optimizers(self) -> Any:
        decayed = [(n, p) for n, p in self.named_parameters() if p.ndim > 1]
        others = [(n, p) for n, p in self.named_parameters() if p.ndim <= 1]
        kind = self.hparams["optimizer"]
        if kind == "adamw_named":
            return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others}], lr=0.01)
        groups = [{"params": [p for _, p in decayed], "weight_decay": 0.3}, {"params": [p for _, p in others]}]
        if kind == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        if kind == "row_normalized":
            return RowNormalized(groups, lr=0.01)
        return torch.optim.Adagrad(groups, lr=0.01)


UNITS = ("embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head")


def build(**arguments: Any) -> Model:
    torch.manual_seed(3)
    return Model(**arguments)


def batches(seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (32, 2), generator=generator)
    return DataLoader(TensorDataset(tokens[:, 0], tokens[:, 1]), batch_size=8)


@dataclass
class Part:
    """One rank's part of the module, with its optimizer."""

    module: Model
    optimizers: list[torch.optim.Optimizer]
    catalog: ParameterCatalog
    mesh: DeviceMesh

    @property
    def held(self) -> RankPart:
        return RankPart(self.module, self.catalog, self.mesh, self.optimizers)

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            set_gradients(self.module, step)
            for optimizer in self.optimizers:
                optimizer.step()

    def whole(self) -> dict[str, Any]:
        """The state that a single device would save, on rank 0."""
        return {
            "state_dict": gather_full_state(self.held),
            "optimizer_states": [gather_full_optimizer_state(self.held, optimizer) for optimizer in self.optimizers],
        }


def save_sharded(path: Path, part: RankPart, trainer_state: Mapping[str, Any]) -> None:
    """Saves a folder, with the optimizers if there are any."""
    checkpoint = {**trainer_state, "state_dict": part.module.state_dict()}
    prepare_save(path, part, {**checkpoint, "optimizer_states": []} if part.optimizers else checkpoint).write()


def load_checkpoint(path: Path, part: RankPart, *, strict: bool = True, weights_only: bool = False) -> dict[str, Any]:
    """Loads a folder or a file; returns what it has beside model and optimizers."""
    opened = open_checkpoint(path, part.mesh, weights_only=weights_only)
    opened.load(part, strict=strict)
    return {key: value for key, value in opened.content.items() if key not in ("state_dict", "optimizer_states")}


def make_part(layout: Sequence[int], sharded: bool = True, **arguments: Any) -> Part:
    """What this rank has of the model in a pipeline of ``layout[0]`` ranks, with the other axes for data parallelism.

    Un-owned parameters are deleted, and un-owned buffers and extra states hold rubbish.
    """
    axes = {1: (), 2: ("data_parallel",), 3: ("data_parallel_replicate", "data_parallel_shard")}[len(layout)]
    mesh = init_device_mesh("cpu", tuple(layout), mesh_dim_names=("pipeline", *axes))
    module = build(**arguments)
    rank_of_unit = {unit: index * layout[0] // len(UNITS) for index, unit in enumerate(UNITS)}

    def owners(name: str) -> list[int]:
        places = [alias for alias in state if state[alias] is state[name]]
        return sorted({rank_of_unit.get(unit_of(place), 0) for place in places})

    state = module.state_dict(keep_vars=True)
    catalog = ParameterCatalog.from_module(module, owners).with_optimizers(module, [optimizer_of(module)])
    rank = mesh.get_local_rank("pipeline")
    for prefix, submodule in module.named_modules():
        for name in list(submodule._parameters):
            if rank_of_unit[unit_of(f"{prefix}.{name}")] != rank:
                del submodule._parameters[name]
        for name, buffer in submodule._buffers.items():
            if rank not in owners(f"{prefix}.{name}".lstrip(".")) and buffer is not None:
                buffer.fill_(-77)
        if isinstance(submodule, Counter) and rank != rank_of_unit[unit_of(prefix)]:
            submodule.state = {"count": -77}
    if sharded and mesh.size() > layout[0]:
        over = mesh[axes]
        for block in module.blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=over)
        ends = [unit for unit in (module.embedding, module.norm, module.head) if list(unit.parameters())]
        if ends:
            fully_shard(ends, mesh=over)
    return Part(module, [optimizer_of(module)], catalog, mesh)


def unit_of(name: str) -> str:
    return next((unit for unit in UNITS if name.startswith(f"{unit}.") or name == unit), "")


def optimizer_of(module: Model) -> torch.optim.Optimizer:
    configured = module.configure_optimizers()
    return configured["optimizer"] if isinstance(configured, dict) else configured


def set_gradients(module: nn.Module, step: int) -> None:
    """Gradients that depend on the names and the step only, so that every layout takes the same steps."""
    for name, parameter in module.named_parameters():
        name = "embedding.weight" if name == "head.weight" and parameter.shape == (VOCABULARY, WIDTH) else name
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            placements = parameter.placements
            gradient = distribute_tensor(gradient, parameter.device_mesh, placements, src_data_rank=None)
        parameter.grad = gradient


def one_device(steps: Sequence[int], **arguments: Any) -> dict[str, Any]:
    """The state after these steps without any pipeline."""
    module = build(**arguments)
    optimizer = optimizer_of(module)
    for step in steps:
        set_gradients(module, step)
        optimizer.step()
    return {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def differences(left: Any, right: Any, at: str = "") -> list[str]:
    """Where two nests of containers and tensors differ, bit for bit, dtypes and types included.

    The order of keys counts in an OrderedDict, which is what a state_dict is.
    """
    if type(left) is not type(right):
        return [f"{at}: {type(left).__name__} and {type(right).__name__}"]
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and left.device == right.device
        return [] if same and torch.equal(left, right) else [f"{at}: {left} and {right}"]
    if isinstance(left, dict):
        if left.keys() != right.keys() or (isinstance(left, OrderedDict) and list(left) != list(right)):
            return [f"{at}: keys {list(left)} and {list(right)}"]
        return [line for key in left for line in differences(left[key], right[key], f"{at}.{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{at}: {len(left)} and {len(right)} entries"]
        pairs = enumerate(zip(left, right, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{at}.{index}")]
    return [] if left == right else [f"{at}: {left} and {right}"]


def world_size(layout: Sequence[int]) -> int:
    return torch.Size(layout).numel()


def is_rank_zero() -> bool:
    return dist.get_rank() == 0
