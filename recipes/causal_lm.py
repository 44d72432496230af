"""Causal language models of the transformers library, built from their configuration: nothing is downloaded.

Needs the extra ``hf``. Shape letters: B sequences, T tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_pp.recipes.byte_gpt import warmup_cosine


class CausalLM(L.LightningModule):
    """A transformers causal language model with fresh weights and its own loss.

    Args:
        model_type: The transformers name of the architecture, for example ``gpt2`` or ``llama``.
        config: Keyword arguments of that architecture's configuration class.
        learning_rate: Peak of a cosine schedule after the warm-up.
        num_warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: AdamW's decay of the matrices; vectors are not decayed.
        activation_checkpointing: Recompute each block's activations in backward instead of keeping them.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers does not know ``model_type``.
    """

    def __init__(
        self,
        model_type: str,
        config: Mapping[str, Any],
        learning_rate: float = 6e-4,
        num_warmup_steps: int = 100,
        weight_decay: float = 0.1,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ImportError(f"model_type={model_type} needs transformers: pip install 'lightning-pp[hf]'") from error
        self.save_hyperparameters()
        self.config = AutoConfig.for_model(model_type, use_cache=False, **config)
        self.learning_rate = learning_rate
        self.num_warmup_steps = num_warmup_steps
        self.weight_decay = weight_decay
        self.activation_checkpointing = activation_checkpointing
        self.model: Any = None  # a transformers PreTrainedModel, made in configure_model

    def configure_model(self) -> None:
        """Build the model here, where the strategy decides which device, if any, its weights are made on."""
        if self.model is not None:
            return
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(self.config)
        if self.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()

    def _outputs(self, batch: dict[str, Tensor]) -> Any:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Log and return the mean next-token cross-entropy in nats of token ids [B, T]."""
        loss: Tensor = self._outputs(batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss of one batch, averaged over the epoch."""
        self.log("val_loss", self._outputs(batch).loss, prog_bar=True, sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss of one batch, averaged over the epoch."""
        self.log("test_loss", self._outputs(batch).loss, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely next token at every position, [B, T]."""
        return self._outputs(batch).logits.argmax(dim=-1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up and cosine decay to a tenth, stepped with the optimizer."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, self.num_warmup_steps, num_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
