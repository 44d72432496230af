"""Which modules are units, and intercepting the calls of them."""
