"""A close look at some batches: traces of torch's profiler, and what CUDA memory holds."""
