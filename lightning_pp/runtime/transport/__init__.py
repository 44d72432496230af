"""What moves between stages: routes, channels, and sends that are under way."""
