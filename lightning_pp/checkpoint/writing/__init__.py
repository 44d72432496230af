"""Writing checkpoints: sharded folders, single files, in the background."""
