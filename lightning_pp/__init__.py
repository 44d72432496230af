"""Trains an unmodified LightningModule as a pipeline of FSDP2-sharded stages.

Importing the package registers ``Trainer(strategy="pipeline_parallel")``. It imports torch and Lightning only when
something of theirs is used, so that :mod:`lightning_pp.schedule` works without them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pp import _registration

if TYPE_CHECKING:
    from lightning_pp.callbacks import PipelineMonitor
    from lightning_pp.split import BatchPart
    from lightning_pp.strategy import PipelineParallelStrategy

__version__ = "0.1.0"
__all__ = ["BatchPart", "PipelineMonitor", "PipelineParallelStrategy"]

_MODULE_OF = {
    "BatchPart": "lightning_pp.split",
    "PipelineMonitor": "lightning_pp.callbacks",
    "PipelineParallelStrategy": "lightning_pp.strategy",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_registration.register_when_lightning_is_imported()
