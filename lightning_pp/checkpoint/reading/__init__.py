"""Opening checkpoints of either format, checking them, loading them."""
