"""Checkpoints of a run: what they hold, when they are written, how they are loaded."""
