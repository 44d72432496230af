"""Unpickles a table of contents without running code in it."""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch

from lightning_pp.errors import CheckpointError

_ALLOWED = {
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"its table of contents names {module}.{name}, which weights_only=True does not allow; if you trust "
                "the checkpoint, pass weights_only=False"
            )
        return super().find_class(module, name)


def load_table(stream: IO[bytes], weights_only: bool) -> Any:
    """Load what ``torch.distributed.checkpoint`` pickled as ``.metadata``.

    Args:
        stream: The open file.
        weights_only: Allow only the classes that a table consists of.

    Raises:
        CheckpointError: The table names another class.
    """
    return _TableUnpickler(stream).load() if weights_only else pickle.load(stream)
