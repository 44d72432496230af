"""What units do besides returning outputs: attributes, list entries and hooks that tensors leave by."""
