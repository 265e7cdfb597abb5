"""What the processes that tests of the Hub start do."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_parts import number_of, parts
from ckpt_workers import checkpointer, join


def restore(rank: int, world_size: int, rendezvous: str, directory: str, endpoint: str, source: str) -> None:
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    join(rank, world_size, rendezvous)
    into = parts()
    step = checkpointer(directory).restore(into, source)
    Path(f"{rendezvous}-{rank}").write_text(f"{step} {number_of(into)}", encoding="utf-8")
