"""What a dry run finds out and what a stage does with it, as plain data."""
