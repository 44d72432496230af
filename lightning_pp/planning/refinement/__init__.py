"""Cuts inside blocks: which blocks their children can stand for, and whether a step gets shorter by it."""
