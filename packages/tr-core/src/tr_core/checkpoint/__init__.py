"""Save checkpoints, and resume runs from them."""
