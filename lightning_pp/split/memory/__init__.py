"""The memory of a step on every rank, in bytes, before anything is built."""
