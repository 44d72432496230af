"""Finds units, and intercepts their calls."""
