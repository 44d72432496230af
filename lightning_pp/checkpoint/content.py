"""The content of a Trainer's checkpoint, by Lightning's keys."""

from __future__ import annotations

MODEL = "state_dict"
"""The model's tensors and extra states by name; with averaged weights, the averages."""

OPTIMIZERS = "optimizer_states"
"""The optimizers' states; not there if only weights were saved."""

CURRENT_MODEL = "current_model_state"
"""The weights that are trained, beside averaged ones."""
