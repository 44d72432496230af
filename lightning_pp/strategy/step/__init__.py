"""The user's step and hooks: calls outside of a loop, and refusals."""
