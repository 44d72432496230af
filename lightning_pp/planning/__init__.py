"""Cuts, memory and schedules, decided together. Knows no Lightning: the strategy and the command line stand on it."""
