"""Read checkpoints of other programs without executing any of their code, and convert them to this format."""

from tr_ckpt.hf_import.conversion import convert, read
from tr_ckpt.hf_import.trainer_files import ForeignCheckpoint

__all__ = ["ForeignCheckpoint", "convert", "read"]
