"""Models of PEFT in a checkpoint: the adapter alone, or what it makes of the base model, one layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from lightning_pp.checkpoint.ownership.catalog import enumerate_names
from lightning_pp.checkpoint.reading.stored_tensor import StoredTensor
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.cli.export.module import check_fit
from lightning_pp.errors import CheckpointError, ConfigurationError

_PEFT_PREFIX = "base_model.model."  # of names in a PeftModel, and in the file of every adapter
_LORA = "LORA"


def has_adapter(model: Any) -> bool:
    """Whether a transformers model, or what is around it, has adapters of PEFT."""
    return bool(getattr(model, "peft_config", None))


def look_like_peft(names: Mapping[str, Any]) -> bool:
    """Whether tensors are named as PEFT names those of layers that it wraps."""
    return any(".base_layer." in name for name in names)


class PeftCheckpoint:
    """A checkpoint and the PEFT model in it.

    Args:
        model: The model on the meta device: a ``PeftModel``, or a transformers model with an added adapter.
        tensors: What the checkpoint has under the model's name, by the names in the model.
        source: The checkpoint, for errors.
        adapter: The adapter's name; None is the only one.

    Raises:
        ConfigurationError: There is no such adapter, or there are several and none is named.
    """

    def __init__(
        self, model: Any, tensors: Mapping[str, torch.Tensor], source: Location, adapter: str | None = None
    ) -> None:
        self.model = model
        self.source = source
        self.tensors = dict(tensors)
        adapters = list(model.peft_config)
        if adapter not in adapters and (adapter is not None or len(adapters) != 1):
            raise ConfigurationError(f"the model has the adapters {', '.join(adapters)}. Choose one: --adapter NAME")
        self.adapter = adapter or adapters[0]
        self.config = model.peft_config[self.adapter]
        self.is_wrapped = hasattr(model, "get_base_model")
        self.base = model.get_base_model() if self.is_wrapped else model

    def adapter_weights(self, dtype: torch.dtype | None) -> PeftWeights:
        """The adapter's tensors under the names that ``PeftModel.from_pretrained`` reads.

        Args:
            dtype: What floating point tensors are cast to; None leaves them.

        Raises:
            CheckpointError: The tensors are not those of the adapter, or others were trained besides.
        """
        expected = self._adapter_state(self.model.state_dict())
        found = self._adapter_state(self.tensors)
        check_fit(_shapes(found), _shapes(expected), self.source, f"the adapter {self.adapter!r}")
        taken = {id(tensor) for tensor in found.values()}
        trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        others = [name for name in trained if name in self.tensors and id(self.tensors[name]) not in taken]
        if others:
            raise CheckpointError(
                f"{len(others)} parameters outside the adapter were trained too, and an adapter alone would lose them: "
                f"{enumerate_names(others)}. Write the whole model: --merge"
            )
        left_out = [name for name, tensor in self.tensors.items() if id(tensor) not in taken]
        return PeftWeights(found, left_out, dtype)

    def _adapter_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        # embeddings count only where the adapter trains them; "auto" would ask a hub
        found: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, state_dict=dict(state), adapter_name=self.adapter, save_embedding_layers=False
        )
        return found if self.is_wrapped else {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in found.items()}

    def save_adapter_config(self, folder: Path) -> None:
        """Write ``adapter_config.json``, as PEFT's ``save_pretrained`` does."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        if not config.base_model_name_or_path:
            config.base_model_name_or_path = getattr(self.base, "name_or_path", None) or None
        config.save_pretrained(folder)

    @property
    def base_directory(self) -> str | None:
        """Where the adapter's base model is, as far as it knows."""
        return self.config.base_model_name_or_path or getattr(self.base, "name_or_path", None) or None

    def merged_weights(self, dtype: torch.dtype | None) -> MergedWeights:
        """The base model's tensors with the adapter added, under the base model's names.

        Args:
            dtype: What floating point tensors are cast to, after merging; None leaves them.

        Raises:
            ConfigurationError: Such an adapter cannot be merged here.
            CheckpointError: The tensors do not fit the base model.
        """
        kind = getattr(self.config.peft_type, "value", self.config.peft_type)
        if kind != _LORA or getattr(self.config, "trainable_token_indices", None):
            what = f"of type {kind}" if kind != _LORA else "that trains single tokens"
            raise ConfigurationError(
                f"an adapter {what} cannot be merged here, only a LoRA adapter. Write the adapter alone (without "
                "--merge), and merge it with merge_and_unload() of PEFT"
            )
        return MergedWeights(self, dtype)


class PeftWeights:
    """Tensors of a model of PEFT to write, by name; see :class:`lightning_pp.checkpoint.export.ToWrite`.

    Args:
        tensors: By the names to write.
        left_out: Names in the checkpoint that are not written.
        dtype: What floating point tensors are cast to; None leaves them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], left_out: list[str], dtype: torch.dtype | None) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self.names = {name: name for name in tensors}
        self.tied: dict[str, str] = {}
        self.left_out = left_out

    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is written."""
        return {name: (tuple(tensor.shape), _cast(tensor, self._dtype)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor, whole and cast."""
        tensor = self._whole(name)
        return tensor.detach().to(_cast(tensor, self._dtype)).contiguous()

    def _whole(self, name: str) -> torch.Tensor:
        return _real(self._tensors[name])


class MergedWeights(PeftWeights):
    """The tensors of a base model, each with what the adapter adds to it.

    Args:
        checkpoint: The PEFT model.
        dtype: What floating point tensors are cast to; None leaves them.

    Raises:
        ConfigurationError: The adapter changes a weight that is tied to another.
        CheckpointError: The tensors do not fit the base model.
    """

    def __init__(self, checkpoint: PeftCheckpoint, dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self._layers, self._replaced = _wrapped_modules(checkpoint)
        self._merged: tuple[str, Mapping[str, torch.Tensor]] = ("", {})
        with torch.device("meta"):
            target = type(checkpoint.base)(checkpoint.base.config)
        expected = target.state_dict(keep_vars=True)
        self._sources = {name: self._source(name) for name in expected}
        tied = self._tied(expected)
        found = {name: tuple(self._stored(name).shape) for name in expected if self._is_stored(name)}
        kind = type(checkpoint.base).__name__
        check_fit(found | self._unexpected(), _shapes(expected), checkpoint.source, kind)
        super().__init__({name: self._stored(name) for name in expected if name not in tied}, [], dtype)
        self.tied = tied

    def _whole(self, name: str) -> torch.Tensor:
        layer = _holder(name, self._layers)
        if layer is None:
            return super()._whole(name)
        if self._merged[0] != layer:
            self._merged = (layer, self._merge(layer))
        return self._merged[1][name.removeprefix(f"{layer}.")]

    def _merge(self, path: str) -> Mapping[str, torch.Tensor]:
        """The state of one layer, after PEFT has merged it."""
        layer: Any = copy.deepcopy(self._layers[path]).to_empty(device="cpu")
        prefix = f"{self._prefix}{path}."
        stored = self._checkpoint.tensors
        layer.load_state_dict({name: _real(stored[f"{prefix}{name}"]) for name in layer.state_dict()}, assign=True)
        adapters = [self._checkpoint.adapter]
        if hasattr(layer, "unload_and_optionally_merge_module"):
            base: Module = layer.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=adapters)
        else:
            layer.merge(safe_merge=True, adapter_names=adapters)
            base = layer.get_base_layer()
        return base.state_dict()

    @property
    def _prefix(self) -> str:
        return _PEFT_PREFIX if self._checkpoint.is_wrapped else ""

    def _source(self, name: str) -> str:
        """The name in the checkpoint of what ``name`` of the base model is, or is merged into."""
        replaced = _holder(name, self._replaced)
        if replaced is not None:
            rest = name.removeprefix(f"{replaced}.")
            return f"{self._prefix}{replaced}.modules_to_save.{self._checkpoint.adapter}.{rest}"
        layer = _holder(name, self._layers)
        if layer is None:
            return f"{self._prefix}{name}"
        depth, inner = "base_layer.", self._layers[layer].base_layer
        while hasattr(inner, "base_layer"):
            depth, inner = f"{depth}base_layer.", inner.base_layer
        return f"{self._prefix}{layer}.{depth}{name.removeprefix(f'{layer}.')}"

    def _is_stored(self, name: str) -> bool:
        return self._sources[name] in self._checkpoint.tensors

    def _stored(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensors[self._sources[name]]

    def _unexpected(self) -> dict[str, tuple[int, ...]]:
        """What the checkpoint has besides the base model's tensors and those of the layers that PEFT wraps."""
        used = set(self._sources.values())
        wrapped = tuple(f"{self._prefix}{path}." for path in (*self._layers, *self._replaced))
        tensors = self._checkpoint.tensors.items()
        return {n: tuple(t.shape) for n, t in tensors if n not in used and not n.startswith(wrapped)}

    def _tied(self, expected: Mapping[str, torch.Tensor]) -> dict[str, str]:
        first: dict[int, str] = {}
        tied = {name: kept for name, tensor in expected.items() if (kept := first.setdefault(id(tensor), name)) != name}
        for name, kept in tied.items():
            changed = [each for each in (name, kept) if _holder(each, {**self._layers, **self._replaced}) is not None]
            if changed:
                raise ConfigurationError(
                    f"the adapter changes {changed[0]}, but {name} and {kept} are tied in "
                    f"{type(self._checkpoint.base).__name__}, so a merge would change both. Write the adapter alone "
                    "(without --merge), or train with tie_word_embeddings=false"
                )
        return tied


def _wrapped_modules(checkpoint: PeftCheckpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Layers with an adapter, and modules that were trained whole instead of others; by name in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    for name, module in checkpoint.base.named_modules():
        if _holder(name, {**layers, **replaced}) is not None:
            continue
        if isinstance(module, BaseTunerLayer):
            layers[name] = module
        elif isinstance(module, ModulesToSaveWrapper):
            replaced[name] = module
    return layers, replaced


def _holder(name: str, modules: Mapping[str, Any]) -> str | None:
    """Which of ``modules`` has ``name`` inside."""
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((path for path in paths if path in modules), None)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
