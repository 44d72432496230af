"""The ranks watch each other: the first failure of a run, processes that have ended or stopped, ranks that stand."""
