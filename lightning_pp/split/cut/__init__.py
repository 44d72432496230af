"""Which unit runs on which stage."""
