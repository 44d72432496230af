"""The ranks watch each other: by a table in the store to which each rank writes, and by the host's processes."""
