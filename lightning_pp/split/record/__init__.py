"""The results of a dry run and the plans made from them, as plain data."""
