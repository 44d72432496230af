"""The private names of torch that the callbacks use; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from typing import Any

from lightning_pp._private_names import private

# records the latest max_entries allocations of CUDA memory; with enabled=None no more
record_memory_history: Any = private("torch.cuda.memory._record_memory_history")
# writes what CUDA memory holds, and what was recorded, for https://pytorch.org/memory_viz
dump_snapshot: Any = private("torch.cuda.memory._dump_snapshot")
