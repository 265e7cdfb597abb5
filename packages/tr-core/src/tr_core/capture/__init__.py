"""Capture the operations of a training step, and replay them without the Python code that they came from."""
