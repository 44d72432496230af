"""Whether parts of a batch give what the whole gives."""
