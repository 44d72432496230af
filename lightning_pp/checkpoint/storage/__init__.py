"""Files and folders that appear whole or not at all, and how tensors lie in them."""
