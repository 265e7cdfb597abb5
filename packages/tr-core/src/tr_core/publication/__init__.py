"""What is told of a run to others: model card, Hub."""
