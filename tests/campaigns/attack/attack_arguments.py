"""Attack what reads arguments, configurations of launchers and files of earlier runs: changed bytes in every parser."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import fuzz_batches
from attack_counts import Count, Options
from fuzz_arguments import parsers

FUZZED = 100_000  # files a parser
QUICK = 500


def attack(options: Options) -> Iterator[Count]:
    """Yield a count for each parser."""
    logging.disable(logging.CRITICAL)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # a launcher's, which arguments would be checked against
        os.environ.pop(variable, None)
    with fuzz_batches.fast_folder(options.folder) as folder:
        for parser in parsers():
            work = folder / "fuzz"
            work.mkdir(exist_ok=True)
            yield fuzz_batches.fuzz(parser, QUICK if options.quick else FUZZED, options.seed, options.jobs, work)
