"""The memory of ranks, and cuts within a memory limit."""
