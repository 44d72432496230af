"""Findings: what makes a step longer, what to change, and the simulated gain. Knows no Lightning."""
