"""Train on XLA devices (TPUs, and PJRT's CPU), by torch_xla: one replica a process, or one model over many devices."""

from tr_dist.xla.settings import XlaSharding
from tr_dist.xla.strategy import XLA

__all__ = ["XLA", "XlaSharding"]
