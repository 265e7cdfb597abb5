"""Checkpoints of models and optimizers that are sharded over ranks, which any other number of ranks can load.

Any part whose state holds DTensors is saved in shards, each rank its own; nothing has to be asked for. `stateful`
makes the parts of a model and its optimizer so that the order of parameters does not matter, `export` makes one
model of the shards.
"""

from tr_ckpt.sharded.exporting import export
from tr_ckpt.sharded.named_state import ModelState, OptimizerState, stateful

__all__ = ["ModelState", "OptimizerState", "export", "stateful"]
