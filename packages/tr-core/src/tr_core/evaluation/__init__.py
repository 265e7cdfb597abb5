"""Evaluation of a model: prediction, collection of outputs, metrics, generation."""
