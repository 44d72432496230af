"""Whether a step computes the same for parts of a batch as for the whole."""
