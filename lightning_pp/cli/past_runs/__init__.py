"""``lightning-pp-report``: a run that has ended, shown again."""
