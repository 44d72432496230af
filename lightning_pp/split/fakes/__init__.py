"""Fakes: parameters and values that a stage does not have."""
