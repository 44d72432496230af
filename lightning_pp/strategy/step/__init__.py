"""The user's step and the user's hooks: calling them outside of a loop, and what they may not do."""
