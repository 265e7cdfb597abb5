"""Checkpoints of models and optimizers that are sharded over ranks, loadable on any other number of ranks.

Any part whose state holds DTensors is saved in shards automatically, each rank its own. `stateful`
makes the parts of a model and its optimizer independent of the order of parameters. `export` writes one
model from the shards.
"""

from tr_ckpt.sharded.exporting import export
from tr_ckpt.sharded.named_state import ModelState, OptimizerState, stateful

__all__ = ["ModelState", "OptimizerState", "export", "stateful"]
