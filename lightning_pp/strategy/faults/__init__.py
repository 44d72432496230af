"""How a run ends that fails: the first failure is told on every rank, and no rank waits for one that has failed."""
