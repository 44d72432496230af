"""``lightning-pp-plan``: what a run would look like, without training."""
