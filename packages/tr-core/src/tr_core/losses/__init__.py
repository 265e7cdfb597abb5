"""What a loss is, and what it is divided by."""
