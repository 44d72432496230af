"""Backward in two actions: input gradients in I, weight gradients, deferred at the operation, in W."""
