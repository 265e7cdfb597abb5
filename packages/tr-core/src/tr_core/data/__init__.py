"""From samples to the micro-batches of a step: order, columns, loading."""
