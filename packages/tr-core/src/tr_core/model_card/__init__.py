"""Model cards: text and metadata."""
