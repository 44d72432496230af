"""``lightning-pp-doctor``: checks whether pipelines run correctly on this machine, before a training runs."""
