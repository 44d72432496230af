"""The state of the unsplit module, the ranks that hold it, and how these ranks agree."""
