"""Plans of recorded steps, and the state by which one serves again."""
