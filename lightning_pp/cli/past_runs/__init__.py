"""``lightning-pp-report``: shows and compares runs that have ended."""
