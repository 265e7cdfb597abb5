"""Show runs on a page: curves, where the time went, arguments, warnings."""
