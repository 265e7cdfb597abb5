"""Memory-efficient optimizers and parameter groups for any PyTorch training loop."""
