"""Measures units one at a time, alone on the present device, without the rest of the model."""
