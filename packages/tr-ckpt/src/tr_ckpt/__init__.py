"""Atomic, verified checkpoints for any PyTorch training loop."""
