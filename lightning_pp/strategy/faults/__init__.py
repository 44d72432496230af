"""How a run ends early: by a failure, which every rank reports so that none waits for it, a signal, or `exit()`."""
