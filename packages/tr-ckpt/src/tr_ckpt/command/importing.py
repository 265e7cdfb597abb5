"""`trainer ckpt import`: turn a checkpoint of another program into one of ours."""

from __future__ import annotations

import argparse
import logging

from tr_ckpt.command import selection
from tr_ckpt.command.table import say, size_text
from tr_ckpt.foreign import convert


def run(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint and say what became of it."""
    logger = logging.getLogger("tr_ckpt.foreign")
    handler = logging.StreamHandler()  # what is to be known of the conversion is logged
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        folder = convert(arguments.source, arguments.target, prefix=arguments.prefix)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    described = selection.select_one(folder, arguments.prefix).described
    assert described is not None  # it is complete
    held = " ".join(sorted(described.parts))
    say(f"{folder}: step {described.step}, {size_text(described.total_bytes)}, parts {held}")
    return 0
