"""Consume gradients during the backward pass, and apply what was kept of them."""
