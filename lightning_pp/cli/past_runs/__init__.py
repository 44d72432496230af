"""``lightning-pp-report``: runs that have ended, shown again and compared."""
