"""Rules that compute an update from a gradient, or its projection, and from moments of earlier ones."""
