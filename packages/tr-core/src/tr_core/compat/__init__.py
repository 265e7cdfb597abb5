"""What subclasses written for transformers need, and nothing else."""
