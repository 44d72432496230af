"""Process groups, meshes and small messages between ranks: the only code that makes groups."""
