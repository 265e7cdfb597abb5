"""Low-rank bases of gradients: which side, how they are found, and when."""
