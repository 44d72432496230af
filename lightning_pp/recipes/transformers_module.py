"""Models of the transformers library, from their configuration or a local directory: nothing is downloaded.

Needs the extra ``hf``, ``peft`` for adapters, and ``fp8`` for float8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_pp.recipes.optimization import RecipeModule


class TransformersModule(RecipeModule):
    """A model of transformers with its own loss; a subclass names the class of models and chooses their arguments.

    Args:
        model_type: The transformers name of an architecture, for example ``gpt2`` or ``llama``: its fresh weights.
        config: Keyword arguments of that architecture's configuration class; with ``directory``, new values for
            fields of its ``config.json``.
        directory: A model directory on this machine, as ``save_pretrained`` writes it, in place of ``model_type``.
        weights: Whether each process reads the weights of ``directory``. False: the pipeline's
            ``initial_weights`` reads them instead, each process only its own part.
        lora: Keyword arguments of ``peft.LoraConfig``, such as ``r`` and ``target_modules``. What it adds is trained,
            the rest is frozen. None trains all.
        learning_rate: Peak of a cosine schedule after the warm-up.
        num_warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of the matrices; vectors are not decayed.
        activation_checkpointing: Recompute each block's activations in backward instead of keeping them.
        optimizer: Makes the optimizer from groups of parameters and ``lr``; None is AdamW.
        float8: A recipe of torchao (``tensorwise``, ``rowwise`` or ``rowwise_with_gw_hp``): linear layers compute in
            float8, emulated without a GPU. The head and layers with sizes not divisible by 16 are not
            converted. None converts nothing.

    Raises:
        ImportError: transformers, peft for ``lora`` or torchao for ``float8`` is not installed.
        ValueError: Not one of ``model_type`` and ``directory`` is given, transformers does not know the model, or
            ``float8`` is no recipe of torchao, or given together with ``lora``.
        FileNotFoundError: ``directory`` has no ``config.json``.
    """

    #: The class of transformers that makes the model.
    auto_class: ClassVar[str]
    #: What PEFT calls its task; None where it has no word for it.
    peft_task: ClassVar[str | None] = None

    def __init__(
        self,
        model_type: str | None = None,
        config: Mapping[str, Any] | None = None,
        directory: str | None = None,
        weights: bool = True,
        lora: Mapping[str, Any] | None = None,
        learning_rate: float = 6e-4,
        num_warmup_steps: int = 100,
        weight_decay: float = 0.1,
        activation_checkpointing: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        float8: str | None = None,
    ) -> None:
        super().__init__(learning_rate, num_warmup_steps, weight_decay, optimizer)
        self.config = _configuration(model_type, config or {}, directory)
        self.lora = None if lora is None else _lora_configuration(lora, self.peft_task)
        self.save_hyperparameters(ignore=["optimizer"])
        self.directory = str(Path(directory).expanduser()) if directory is not None and weights else None
        if float8 not in (None, "tensorwise", "rowwise", "rowwise_with_gw_hp"):
            raise ValueError(f"float8={float8!r} is none of 'tensorwise', 'rowwise' and 'rowwise_with_gw_hp'")
        if float8 is not None and lora is not None:
            raise ValueError("float8 and lora are both given, which has not been tested: leave one out")
        self.float8 = float8
        self.activation_checkpointing = activation_checkpointing
        self.model: Any = None  # a transformers PreTrainedModel, or a PeftModel around one, made in configure_model
        self._made_without_memory = _without_memory()

    def configure_model(self) -> None:
        """Build the model here, where the strategy decides which device, if any, its weights are made on."""
        if self.model is not None:
            return
        import transformers

        kind = getattr(transformers, self.auto_class)
        dtype = torch.get_default_dtype()
        if self.directory is None or self._made_without_memory:
            self.model = kind.from_config(self.config, dtype=dtype)
        elif _without_memory():
            raise ValueError(
                f"meta_init makes parameters without memory, so the weights of {self.directory} cannot be loaded. Give "
                f"model.weights=false and strategy.initial_weights={self.directory}, or leave strategy.meta_init out."
            )
        else:
            self.model = kind.from_pretrained(self.directory, config=self.config, dtype=dtype)
        if self.activation_checkpointing:
            name = "activation_checkpointing_enable"  # the former name is deprecated
            enable = getattr(self.model, name if hasattr(self.model, name) else "gradient_checkpointing_enable")
            enable({"use_reentrant": False})
        if self.float8 is not None:
            _convert_to_float8(self.model, self.float8)
        if self.lora is not None:
            from peft import get_peft_model

            with warnings.catch_warnings():  # PEFT asks transformers by a name that is going to change
                warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
                self.model = get_peft_model(self.model, self.lora)
        self.model.train()

    def _outputs(self, batch: dict[str, Tensor]) -> Any:
        """What the model says of a batch, with its ``loss`` and ``logits``."""
        return self.model(**batch)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self._outputs(batch).loss
        return loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely class of each logit's last dimension."""
        return self._outputs(batch).logits.argmax(dim=-1)  # type: ignore[no-any-return]


def _convert_to_float8(model: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_converted(module: nn.Module, name: str) -> bool:
        sizes = module.in_features, module.out_features
        return not name.endswith("lm_head") and all(int(size) % 16 == 0 for size in sizes)  # type: ignore[arg-type]

    emulate = not torch.cuda.is_available()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=is_converted, config=config)


def _configuration(model_type: str | None, config: Mapping[str, Any], directory: str | None) -> Any:
    """The transformers configuration, without a cache of keys, which training has no use for."""
    if (model_type is None) == (directory is None):
        both = "both" if directory is not None else "none"
        raise ValueError(
            f"{both} of model.directory and model.model_type given: name a local model directory "
            "(model.directory=DIR) for its weights, or an architecture (model.model_type=llama) for fresh ones"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError("this model needs transformers: pip install 'transformers>=4.56'") from error
    if directory is None:
        return AutoConfig.for_model(model_type, **{"use_cache": False, **config})
    if not (Path(directory).expanduser() / "config.json").is_file():
        raise FileNotFoundError(
            f"model.directory={directory} has no config.json (looked from {Path.cwd()}); it has to be a model "
            "directory on this machine, as save_pretrained writes it"
        )
    place = Path(directory).expanduser().absolute()
    return AutoConfig.from_pretrained(place, local_files_only=True, **{"use_cache": False, **config})


def _lora_configuration(lora: Mapping[str, Any], task: str | None) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("model.lora needs peft: pip install 'peft>=0.18'") from error
    return LoraConfig(**{"task_type": task, **lora})


def _without_memory() -> bool:
    """Whether parameters that are made now have no memory."""
    return nn.Linear(1, 1, bias=False).weight.is_meta
