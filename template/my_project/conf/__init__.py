"""The configuration of the application."""
