"""Measures the first batches of a training, and changes to the schedule that is best for what was measured."""
