"""Read checkpoints of other programs, without executing anything of them, and write them as ours."""

from tr_ckpt.hf_import.conversion import convert, read
from tr_ckpt.hf_import.trainer_files import ForeignCheckpoint

__all__ = ["ForeignCheckpoint", "convert", "read"]
