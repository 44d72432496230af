"""Known speeds of devices and of the links between them."""
