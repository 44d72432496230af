"""Everything that takes the place of a part of Lightning, or patches one."""
