"""Everything that replaces a part of Lightning, or patches one."""
