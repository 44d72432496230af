"""The user's options for the schedule, and the programs made from them."""
