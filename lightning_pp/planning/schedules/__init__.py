"""What the user asks of the schedule, and the programs that come of it."""
