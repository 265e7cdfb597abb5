"""Distributed strategies for any PyTorch training loop."""
