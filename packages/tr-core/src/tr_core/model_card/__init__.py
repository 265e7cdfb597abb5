"""Write model cards: text and metadata."""
