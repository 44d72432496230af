"""What a batch came to: outputs, logs, metrics and attributes, the same on every rank."""
