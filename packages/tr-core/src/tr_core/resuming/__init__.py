"""What a resumed run takes from its checkpoint, and what from the arguments of now."""
