"""This rank's parameters: their memory, dtypes, gradients and optimizer."""
