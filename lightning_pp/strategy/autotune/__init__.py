"""Measures the first batches of a training, and changes to the best schedule for the measured costs."""
