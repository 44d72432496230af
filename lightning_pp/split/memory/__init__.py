"""What a step holds on every rank, in bytes, before anything is built."""
