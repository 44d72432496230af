"""``lightning-pp-plan --search``: all plans for some devices, the best of them, and how each is written."""
