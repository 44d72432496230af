"""Cuts inside blocks: which blocks can be replaced by their children, and whether this shortens a step."""
