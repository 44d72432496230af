"""The ranks watch each other: one table of what each tells in the store, and what the host shows of processes."""
