"""What devices, and the links between them, are known to do."""
