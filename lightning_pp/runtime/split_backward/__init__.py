"""Backward in two actions: input gradients in I, deferred weight gradients in W."""
