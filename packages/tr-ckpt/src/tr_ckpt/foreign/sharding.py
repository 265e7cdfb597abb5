"""Tell checkpoints whose state is in pieces of several processes, which only the program that wrote them joins."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from tr_ckpt import reads
from tr_ckpt.errors import CheckpointError

_JOIN_FSDP = (
    "merge the weights with `accelerate merge-weights {folder}/pytorch_model_fsdp_0 OUTPUT` and begin a new run with "
    "them, or have transformers go on for a step on one process without FSDP and save"
)
_JOIN_DEEPSPEED = (
    "join the weights with `python {folder}/zero_to_fp32.py {folder} OUTPUT` and begin a new run with them; the "
    "optimizer's state is in a form that only DeepSpeed reads"
)
_JOIN_OTHER = "have the program that wrote it save model and optimizer whole, in one file each"

# Names of files and folders, by the way of training that leaves them, and what joins the pieces.
_MARKS = (
    ("FSDP", ("pytorch_model_fsdp*", "optimizer_[0-9]*", "optimizer.bin"), _JOIN_FSDP),
    ("DeepSpeed", ("global_step[0-9]*", "zero_to_fp32.py", "zero_pp_rank_*"), _JOIN_DEEPSPEED),
    ("FSDP on XLA or SageMaker", ("rank*-of-*", "optimizer.pt_*"), _JOIN_OTHER),
)


def refuse(folder: Path) -> None:
    """Refuse a folder whose state is in pieces.

    Raises:
        CheckpointError: it is; the message names the files, and says what joins them.
    """
    for kind, patterns, remedy in _MARKS:
        seen = [name for name in reads.names_in(folder) if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
        if seen:
            raise CheckpointError(
                f"its state is in pieces that training with {kind} left ({', '.join(seen)}), which are not read here: "
                + remedy.format(folder=folder.name)
            )
