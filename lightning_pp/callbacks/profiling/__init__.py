"""Traces of torch's profiler and CUDA memory snapshots of some batches."""
