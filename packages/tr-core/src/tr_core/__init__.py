"""A complete training and evaluation loop for PyTorch models."""
