"""Messages between stages: routes, channels, and sends under way."""
