"""Checkpoints of a pipeline (temporary)."""

from __future__ import annotations


class PipelineState:
    @classmethod
    def of(cls, engine, optimizers, names):
        return cls()
