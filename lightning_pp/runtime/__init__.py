"""Runs one rank's program: its actions, the split backward, and the transport between stages."""
