"""Read checkpoints of other programs, without executing anything of them, and write them as ours."""

from tr_ckpt.foreign.checkpoint import ForeignCheckpoint
from tr_ckpt.foreign.conversion import convert
from tr_ckpt.foreign.reading import read

__all__ = ["ForeignCheckpoint", "convert", "read"]
