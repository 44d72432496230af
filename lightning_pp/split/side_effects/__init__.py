"""Side effects of units: attributes, list entries and hooks by which tensors leave them."""
