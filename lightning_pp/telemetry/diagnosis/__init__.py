"""Findings: what holds a step up, what to change, and what that is simulated to save. Knows no Lightning."""
