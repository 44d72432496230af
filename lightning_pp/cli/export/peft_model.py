"""Models of PEFT in a checkpoint: the adapter alone, or the base model with the adapter merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_pp.checkpoint.export import Weights
from lightning_pp.checkpoint.reading.stored_tensor import in_memory
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.cli.export.module import check_fit
from lightning_pp.errors import CheckpointError, ConfigurationError, enumerate_names

_PEFT_PREFIX = "base_model.model."  # of names in a PeftModel, and in the file of every adapter


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

    def adapter_weights(self, dtype: torch.dtype | None) -> Weights:
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
        return Weights(found, left_out=left_out, dtype=dtype)

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
        config.base_model_name_or_path = self.base_directory
        config.save_pretrained(folder)

    @property
    def base_directory(self) -> str | None:
        """Where the adapter's base model is, as far as it knows."""
        return self.config.base_model_name_or_path or getattr(self.base, "name_or_path", None) or None

    def merged_weights(self, dtype: torch.dtype | None) -> Weights:
        """The base model's tensors with the adapter added by PEFT, under the base model's names; all are in memory.

        Args:
            dtype: What floating point tensors are cast to, after merging; None leaves them.

        Raises:
            ConfigurationError: PEFT cannot merge such an adapter, or it changes one of two tied weights.
            CheckpointError: The tensors do not fit the model.
        """
        model, tensors = self.model, self.tensors
        with torch.device("meta"):
            fresh = type(self.base)(self.base.config)
            if not self.is_wrapped:
                from peft import get_peft_model

                model = get_peft_model(copy.deepcopy(fresh), self.config, adapter_name=self.adapter)
                tensors = {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}
        if not hasattr(model, "merge_and_unload"):
            kind = getattr(self.config.peft_type, "value", self.config.peft_type)
            raise ConfigurationError(
                f"PEFT cannot merge an adapter of type {kind} into its base model. Write the adapter alone (without "
                "--merge)"
            )
        check_fit(_shapes(tensors), _shapes(model.state_dict()), self.source, type(self.base).__name__)
        model.load_state_dict({name: in_memory(tensor) for name, tensor in tensors.items()}, assign=True)
        merged = model.merge_and_unload(safe_merge=True, adapter_names=[self.adapter]).state_dict()
        tied = _tied(fresh.state_dict(keep_vars=True))
        for name, kept in tied.items():
            if not torch.equal(merged[name], merged[kept]):
                raise ConfigurationError(
                    f"the adapter changes {name} or {kept}, which are tied in {type(fresh).__name__}, so a merge would "
                    "change both. Write the adapter alone (without --merge), or train with tie_word_embeddings=false"
                )
        return Weights({name: tensor for name, tensor in merged.items() if name not in tied}, tied, dtype=dtype)


def _tied(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For the further names of tied parameters, the first name."""
    first: dict[int, str] = {}
    return {name: kept for name, tensor in state.items() if (kept := first.setdefault(id(tensor), name)) != name}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
