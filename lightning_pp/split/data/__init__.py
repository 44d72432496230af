"""Batches as trees of tensors, and their microbatches."""
