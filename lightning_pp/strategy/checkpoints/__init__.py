"""Checkpoints of a run: their content, when they are written, how they are loaded."""
