"""Plans of recorded steps, and the state that decides whether a plan can be reused."""
