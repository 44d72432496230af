"""How a run ends before its time: by a failure, told on every rank so that none waits for it, a signal, or `exit()`."""
