"""The results of a batch: outputs, logs, metrics and attributes, the same on every rank."""
