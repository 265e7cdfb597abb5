"""How samples become the micro-batches of a step: order, columns, loading."""
