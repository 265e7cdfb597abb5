"""Find out which program wrote a checkpoint, and read it.

A further format is one more module with `PROGRAM`, `recognises(path)` and `read(path)`, named in `READERS`.
"""

from __future__ import annotations

from pathlib import Path

from tr_ckpt.errors import CheckpointError
from tr_ckpt.foreign import transformers_trainer
from tr_ckpt.foreign.checkpoint import ForeignCheckpoint

READERS = (transformers_trainer,)


def read(path: str | Path) -> ForeignCheckpoint:
    """Return what the checkpoint of another program says, in the shape of the parts of ours; executes nothing of it.

    Raises:
        CheckpointError: it is of no program that is known here, or is not read in this form.
        DamagedCheckpointError: it is damaged.
    """
    path = Path(path).expanduser().absolute()
    for reader in READERS:
        if reader.recognises(path):
            return reader.read(path)
    known = ", ".join(reader.PROGRAM for reader in READERS)
    raise CheckpointError(f"{path} is no checkpoint of a program that is read here ({known})")
