"""Save and stop at a step boundary, on all ranks together."""
