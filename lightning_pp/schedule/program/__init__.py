"""Programs: actions, their placement, their notation."""
