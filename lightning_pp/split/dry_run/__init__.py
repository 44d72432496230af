"""Runs the user's step once on fakes, and records what it calls and what crosses between units."""
