"""``lightning-pp-doctor``: whether pipelines run on this machine as they should, told before a training does."""
