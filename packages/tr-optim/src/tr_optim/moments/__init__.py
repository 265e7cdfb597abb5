"""Rules that turn a gradient, or its projection, into an update by what they remember of earlier ones."""
