"""The callbacks of this package, one in each file."""
