"""What surrounds a run and is undone after it: compilation, memory, precision."""
