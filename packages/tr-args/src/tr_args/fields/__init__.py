"""Declare the training arguments, one topic a file; the text under a field is its help."""
