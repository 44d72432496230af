"""Gradients after a backward: hooks, sums, means over replicas, norms and clipping, scales."""
