"""How a model is evaluated: prediction, collecting, metrics, generation."""
