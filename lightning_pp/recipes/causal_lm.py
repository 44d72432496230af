"""Causal language models of the transformers library (extra ``hf``).

Shape letters: B sequences, T tokens per sequence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_pp.recipes.transformers_module import TransformersModule

_OF_THE_BATCH = ("input_ids", "attention_mask", "position_ids")


class CausalLM(TransformersModule):
    """A transformers causal language model; the loss is the mean next-token cross-entropy in nats.

    Batches are dicts with ``input_ids``, int64 [B, T], and, if there are any, ``labels``, ``position_ids`` and
    ``attention_mask`` as transformers has them; without ``labels`` every token is to be predicted. Position ids that
    begin again at 0 within a row tell its documents apart: transformers masks their attention.
    """

    auto_class = "AutoModelForCausalLM"
    peft_task = "CAUSAL_LM"

    def _outputs(self, batch: dict[str, Tensor]) -> Any:
        inputs = {name: batch[name] for name in _OF_THE_BATCH if name in batch}
        return self.model(**inputs, labels=batch.get("labels", batch["input_ids"]))
